"""The program that each rank runs: `python -m soup_flows.training RUN_DIR`.

torch, transformers, peft and deepspeed are imported in this package and nowhere else.
"""
