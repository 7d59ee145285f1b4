"""Child process: write each config on stdin as its class does, and count the real model.

Prints `{name: {"config": ..., "parameters": n, "shapes": {...}}}`.
"""

import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

with redirect_stdout(sys.stderr):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    answers = {}
    for name, (kind, changes) in json.load(sys.stdin).items():
        config = AutoConfig.for_model(kind, **changes)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            written = json.loads((Path(folder) / "config.json").read_text())
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shapes = {n: list(p.shape) for n, p in model.named_parameters()}
        adapted = sum(
            sum(m.weight.shape)
            for n, m in model.named_modules()
            if (isinstance(m, torch.nn.Linear) or type(m).__name__ == "Conv1D")
            and m is not model.get_output_embeddings()
        )
        answers[name] = {
            "config": written,
            "parameters": sum(p.numel() for p in model.parameters()),
            "shapes": shapes,
            "lora_per_rank": adapted,
        }
json.dump(answers, sys.stdout)
