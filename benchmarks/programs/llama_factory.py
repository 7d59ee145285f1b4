"""LLaMA-Factory by its own command, with neat packing: `llama_factory.py ASSETS OUT`."""

import importlib.util
import os
import sys
from pathlib import Path

import yaml

assets, out = sys.argv[1:3]
config = {
    "model_name_or_path": f"{assets}/model",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "messages",
    "dataset_dir": assets,
    "template": "chatml",
    "cutoff_len": 512,
    "neat_packing": True,
    "overwrite_cache": True,
    "preprocessing_num_workers": 1,
    "dataloader_num_workers": 0,
    "output_dir": f"{out}/output",
    "logging_steps": 10,
    "save_strategy": "no",
    "report_to": "none",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "num_train_epochs": 1.0,
    "max_steps": int(sys.argv[3]) if len(sys.argv) > 3 else -1,
    "lr_scheduler_type": "linear",
    "bf16": False,
    "use_cpu": True,
    "ddp_backend": "gloo",
    "seed": 1,
    "disable_gradient_checkpointing": True,
    "flash_attn": "sdpa",
    "disable_tqdm": True,
}
path = Path(out) / "config.yaml"
path.write_text(yaml.safe_dump(config))
here = Path(sys.executable).parent
os.environ |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "DISABLE_VERSION_CHECK": "1"}
os.environ["PATH"] = f"{here}:{os.environ['PATH']}"
if importlib.util.find_spec("torchaudio") is None:  # it is imported for text too, and not used for it
    (Path(out) / "stubs").mkdir()
    (Path(out) / "stubs" / "torchaudio.py").touch()
    os.environ["PYTHONPATH"] += f":{out}/stubs"
os.execv(here / "llamafactory-cli", ["llamafactory-cli", "train", str(path)])
