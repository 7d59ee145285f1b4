"""Soup CLI: its YAML, and the options of `soup train`.

Made from what its repository (MakazhanAlpamys/Soup at 2428453) and release 0.77.0 document and do, as far as it was
read; keys with a plain meaning, such as `lora.alpha`, are read by it. Defaults that were not seen are said to be so.
"""

from __future__ import annotations

from typing import Any

from soup_flows.migrate.convert import (
    SCHEDULES,
    count,
    number,
    one_of,
    optimizer,
    share,
    steps,
    target_modules,
    yes,
)
from soup_flows.migrate.parts import batch
from soup_flows.migrate.reading import Reading
from soup_flows.migrate.values import UNKNOWN, NotTaken, Part, To, Tool, Without

SFT = "use sft, pretrain, dpo, kto or orpo"
TASKS = one_of(
    {name: name for name in ("sft", "pretrain", "dpo", "kto", "orpo")},
    others=dict.fromkeys(("simpo", "grpo", "ppo", "prm", "mole", "online_dpo", "ipo", "embedding"), SFT),
)
FORMATS = (
    *("auto", "alpaca", "sharegpt", "chatml", "plaintext", "dpo", "kto", "tool-calling", "pre_tokenized"),
    "input_output",
)
"""Values of `data.format` whose rows are known here by their columns (docs/data.md)."""
ADAPTERS = Part(
    ("training.method", "lora.r"),
    "4bit and 64 where they are not written; r 0 is full, 4bit qlora, none lora",
)
SIZES = Part(
    ("training.per_device_train_batch_size", "training.global_batch_size"),
    "rows x passes x GPUs; auto and 4 where they are not written: auto leaves it at 16",
)


def method(reading: Reading) -> None:
    """Read `quantization` (4bit where it is not written) and `lora.r` (64; 0 trains every weight)."""
    bits, rank = "training.quantization", "training.lora.r"
    wide = reading.read(rank, number, "lora.r", 64)
    asked = reading.values.get(bits, "4bit")
    word = str(asked).strip().lower()
    four = word in ("4bit", "4-bit", "nf4")
    if not four and word not in ("none", "no", "false", "16bit"):
        message = (
            f"{asked!r}: a base is loaded in 4 bits, or as it is; as it is is taken, which needs more memory"
        )
        reading.wrong(bits, NotTaken(message, "use 4bit or none", "warning"), "training.method")
    found = "full" if rank in reading.values and wide == 0 else "qlora" if four else "lora"
    keys = [key for key in (bits, rank) if key in reading.values and (key == bits or wide == 0)]
    reading.put("training.method", found, *(keys or [bits]), written=bool(keys))
    if found == "full" and four and bits in reading.values:
        message = "lora.r is 0, and weights in 4 bits cannot be trained; they are loaded as they are"
        reading.say(bits, "MIG006", "warning", message, "write quantization: none")
    if found != "full":
        reading.put("lora.r", int(wide), rank, written=rank in reading.values)


def row_format(reading: Reading) -> None:
    """Read `data.format`: the columns tell it here; pictures, sound and vectors are not trained."""
    key = "data.format"
    if not reading.asked(key):
        return
    word = str(reading.values[key]).lower()
    if word in FORMATS:
        reading.settle(key)
    else:
        message = f"rows of {word!r} are not known here"
        reading.wrong(key, NotTaken(message, "see docs/data.md for the columns that are"), "dataset")


def answers(value: Any) -> str:
    """Return what the loss counts."""
    return "assistant" if yes(value) else "all"


KEYS: dict[str, To | Part | Without] = {
    "base": To("model"),
    "task": To("training.task", TASKS),
    "output": To("output_dir"),
    "data.train": To("dataset"),
    "data.format": Part(("dataset",), "the columns tell it; formats of pictures and sound are refused"),
    "data.val_split": To("data.eval_split", share, note="the rows held out are evaluated before and after"),
    "data.max_length": To("data.max_length", count, UNKNOWN),
    "data.train_on_responses_only": To("data.train_on", answers, UNKNOWN),
    "training.epochs": To("training.num_train_epochs", number, 3),
    "training.max_steps": To("training.max_steps", count),
    "training.lr": To("training.learning_rate", number),
    "training.batch_size": SIZES,
    "training.gradient_accumulation_steps": SIZES,
    "training.scheduler": To("training.lr_scheduler_type", SCHEDULES, UNKNOWN),
    "training.warmup_ratio": To("training.warmup_ratio", number, UNKNOWN),
    "training.weight_decay": To("training.weight_decay", number, UNKNOWN),
    "training.max_grad_norm": To("training.max_grad_norm", number, UNKNOWN),
    "training.optimizer": To("training.optimizer", optimizer),
    "training.seed": To("training.seed"),
    "training.quantization": ADAPTERS,
    "training.lora.r": ADAPTERS,
    "training.lora.alpha": To("lora.alpha", count, UNKNOWN),
    "training.lora.dropout": To("lora.dropout", number, UNKNOWN),
    "training.lora.target_modules": To("lora.target_modules", target_modules, UNKNOWN),
    "training.lora.use_dora": To("lora.use_dora", yes),
    "training.lora.use_rslora": To("lora.use_rslora", yes),
    "training.gradient_checkpointing": To("training.gradient_checkpointing", yes),
    "training.packing": To("data.packing", yes),
    "training.multipack": To("data.packing", yes, off=(None, "", False)),
    "training.logging_steps": To("training.logging_steps", count),
    "training.save_steps": To("recovery.save_steps", steps),
    "training.use_fsdp2_compile": Without("torch.compile is not supported", "leave it out", "warning"),
}

FLAGS = {
    "--config FILE": "--from-soup FILE; with --save SPEC.yaml once, then --spec SPEC.yaml",
    "--gpus N": "--gpus N",
    "--deepspeed zero2": "--deepspeed zero2 (zero2_offload, zero3, zero++ likewise)",
    "--deepspeed zero3_offload": "--deepspeed zero3_offload; the optimizer is off-loaded too",
    "--deepspeed FILE.json": "--deepspeed-config FILE.json, used byte for byte",
    "--fsdp full_shard": "--fsdp full_shard (shard_grad, full_offload likewise)",
    "--resume auto": "--set recovery.resume=auto (the default: the newest checkpoint that verifies)",
    "--resume DIR": "--set recovery.resume=DIR",
    "--dry-run": "soup-flows plan",
    "--find-lr": "nothing; compare two runs with soup-flows train --set training.learning_rate=...",
    "--allow-oom-attempt": "nothing; the refusal names settings that fit",
    "--nodes, --node-rank, --master-addr, --master-port": "nothing to train with; soup-flows plan --nodes N plans",
    "--hf-resume, --push-as": "a block of the type Soup Checkpoint Store, --set blocks.checkpoint_store=NAME",
    "--track-energy": "nothing to give; energy is in every report where the GPUs tell it",
    "--yes, --no-reexec": "nothing to give",
}
"""Options of `soup train`; those with a flag here are tested against the parser of `soup-flows`."""

SOUP = Tool(
    name="Soup",
    option="--from-soup",
    source="MakazhanAlpamys/Soup@2428453; soup-cli 0.77.0",
    keys=KEYS,
    parts=(
        batch("training.batch_size", "training.gradient_accumulation_steps", ("auto", 4),
              ("training.packing", "training.multipack")),
        method,
        row_format,
    ),
    gpus=1,
    about="The table has the keys whose meaning was seen, and some with a plain meaning, such as `lora.alpha`. "
    "Others are errors with a hint, and defaults that were not seen are said to be so.",
    flags=FLAGS,
)  # fmt: skip
