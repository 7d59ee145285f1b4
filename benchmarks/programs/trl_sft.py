"""TRL's `SFTTrainer` with packing: `trl_sft.py ASSETS OUT`, under torchrun."""

import sys

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

assets, out = sys.argv[1:3]
steps = int(sys.argv[3]) if len(sys.argv) > 3 else -1
rows = load_dataset("json", data_files=f"{assets}/messages.jsonl", split="train", cache_dir=f"{out}/cache")
arguments = SFTConfig(
    output_dir=out,
    per_device_train_batch_size=2,
    num_train_epochs=1,
    max_steps=steps,
    learning_rate=1e-3,
    lr_scheduler_type="linear",
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    bf16=False,
    ddp_backend="gloo",
    seed=1,
    disable_tqdm=True,
    gradient_checkpointing=False,
    assistant_only_loss=True,
    max_length=512,
    packing=True,
    packing_strategy="bfd",
)
SFTTrainer(model=f"{assets}/model", args=arguments, train_dataset=rows).train()

import torch.distributed as dist  # noqa: E402

if dist.is_initialized():
    dist.destroy_process_group()  # a gloo rank that keeps it now and then aborts at its exit
