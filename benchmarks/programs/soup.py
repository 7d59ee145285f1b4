"""Soup by its own command, with packing: `soup.py ASSETS OUT`."""

import os
import sys
from pathlib import Path

import yaml

assets, out = sys.argv[1:3]
training = {
    "epochs": 1,
    "lr": 1e-3,
    "batch_size": 2,
    "gradient_accumulation_steps": 1,
    "quantization": "none",
    "logging_steps": 10,
    "save_steps": 100000,
    "scheduler": "linear",
    "warmup_ratio": 0.0,
    "gradient_checkpointing": False,
    "lora": {"r": 0},
    "packing": True,
}
data = {
    "train": f"{assets}/messages.jsonl",
    "format": "chatml",
    "val_split": 0.0,
    "max_length": 512,
    "train_on_responses_only": True,
}
config = {
    "base": f"{assets}/model",
    "task": "sft",
    "data": data,
    "training": training,
    "output": f"{out}/output",
}
path = Path(out) / "soup.yaml"
path.write_text(yaml.safe_dump(config))
here = Path(sys.executable).parent
# without ACCELERATE_USE_CPU it finds no group of its launcher on CPU
os.environ |= {"ACCELERATE_USE_CPU": "true", "SOUP_NO_AUDIT_LOG": "1", "SOUP_NO_TELEMETRY": "1"}
os.environ["PATH"] = f"{here}:{os.environ['PATH']}"
argv = [
    str(here / "torchrun"),
    "--nproc_per_node",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "localhost:0",
]
os.execv(argv[0], [*argv, "-m", "soup_cli", "train", "-c", str(path), "--yes", "--allow-oom-attempt"])
