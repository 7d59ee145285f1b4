"""Multi-GPU LLM fine-tuning as a dependable stage of a Prefect pipeline."""
