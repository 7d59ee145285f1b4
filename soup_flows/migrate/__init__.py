"""Configs of other fine-tuning tools, as settings of this package: one table per tool, one reader for all.

What a key becomes is in the table of its tool (`soup.py`, `axolotl.py`, `llama_factory.py`); what several keys say
together, such as micro batch, accumulation and GPUs, is in `parts.py`, `engine.py` and `rows.py`.
"""
