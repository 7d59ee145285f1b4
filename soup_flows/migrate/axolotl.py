"""Axolotl: its YAML.

Keys are those of `axolotl/utils/schemas/` (axolotl-ai-cloud/axolotl at 067021c, 2026-07-24), as far as its
examples use them; what ships as `deepspeed_configs/` is of the same commit.
"""

from __future__ import annotations

from typing import Any

from soup_flows.migrate.axolotl_without import WITHOUT
from soup_flows.migrate.common import REMOTE
from soup_flows.migrate.convert import (
    SCHEDULES,
    count,
    number,
    one_of,
    optimizer,
    resume,
    share,
    steps_or_all,
    target_modules,
    yes,
)
from soup_flows.migrate.engine import SHARD, WRAP, engine
from soup_flows.migrate.parts import batch, checkpoints, dtype, evaluations, tracking, warmup
from soup_flows.migrate.reading import Reading
from soup_flows.migrate.rows import axolotl_rows
from soup_flows.migrate.values import NotTaken, Part, To, Tool, Without

RL = one_of(
    {name: name for name in ("dpo", "kto", "orpo")},
    others=dict.fromkeys(("grpo", "gdpo", "ipo", "simpo", "ebft"), "use dpo, kto or orpo"),
)
SIZES = Part(
    ("training.per_device_train_batch_size", "training.global_batch_size"),
    "rows x passes x GPUs; 1 and 1 where they are not written",
)
ADAPTERS = Part(("training.method",), "none is `full`, lora is `lora`, 4 bits below it are `qlora`")
MODULES = Part(("lora.target_modules",), "the linear layers, or those named")
WARM = Part(("training.warmup_ratio",), "a share of the steps; a number of steps needs max_steps")
SAVES = Part(("recovery.save_steps",), "steps; `no` is 0; a number a pass is not known beforehand")
EVALS = Part(("training.eval_steps",), "steps; a number a pass is not known beforehand")
FORMAT = Part(("training.dtype",), "the one that is true; auto is auto; none is fp32")
ROWS = Part(("dataset", "training.task"), "path, split, revision and data_files of one data set")
HELD = Part(("data.eval_dataset",), "path, split, revision and data_files of one data set")
TRACK = Part(("training.report_to",), "a tracker whose key is written")
_SHAPE = "its optimizer is off-loaded, too, as in the shipped file"
SHIPPED = {
    "zero1": ("zero1", ""),
    "zero1_torch_compile": ("zero1", "torch.compile is not supported"),
    "zero2": ("zero2_offload", _SHAPE),
    "zero2_torch_compile": ("zero2_offload", f"{_SHAPE}; torch.compile is not supported"),
    "zero3": ("zero3", "with DeepSpeed's own prefetch and live parameters; the shipped file sets both to 0"),
    "zero3_bf16": (
        "zero3",
        "with DeepSpeed's own prefetch and live parameters; the shipped file sets both to 0",
    ),
    "zero3_bf16_cpuoffload_params": ("zero3_offload", "it off-loads the optimizer too"),
    "zero3_bf16_cpuoffload_all": ("zero3_offload", ""),
}
"""Stem of a file in `deepspeed_configs/` -> the preset, and what differs."""


def method(reading: Reading) -> None:
    """Read `adapter` and the bits of the base below it."""
    adapter = str(reading.values.get("adapter") or "full").lower()
    known = {"full": "full", "none": "full", "lora": "lora", "qlora": "qlora"}
    if adapter not in known:
        message = f"{adapter!r} is no adapter that is trained here"
        reading.wrong("adapter", NotTaken(message, "use lora or qlora"), "training.method")
        return
    found = known[adapter]
    four = reading.read("load_in_4bit", yes, "training.method", False)
    eight = reading.read("load_in_8bit", yes, "training.method", False)
    keys = ["adapter"]
    if found == "lora" and four:
        found, keys = "qlora", ["adapter", "load_in_4bit"]
    elif four:
        keys.append("load_in_4bit")
    if found == "full" and four:
        message = "weights in 4 bits are trained through an adapter alone"
        reading.wrong("load_in_4bit", NotTaken(message, "write adapter: qlora"), "training.method")
    if eight:
        message = "a base in 8 bits is not there; it is loaded as it is, which needs more memory"
        fix = "nothing, where the plan fits; else adapter: qlora and load_in_4bit: true"
        reading.wrong("load_in_8bit", NotTaken(message, fix, "warning"), "training.method")
    reading.put("training.method", found, *keys, written="adapter" in reading.values)
    reading.settle(
        *(k for k in ("load_in_4bit", "load_in_8bit") if k in reading.values and not reading.asked(k))
    )


def modules(reading: Reading) -> None:
    """Read the modules that get an adapter: all linear layers, or those named."""
    named, linear, field = "lora_target_modules", "lora_target_linear", "lora.target_modules"
    if reading.read(linear, yes, field, False):
        reading.put(field, "all-linear", linear)
        if reading.asked(named):
            message = "with lora_target_linear every linear layer gets an adapter, those named are among them"
            reading.say(named, "MIG003", "note", message)
    elif reading.asked(named):
        found = reading.read(named, target_modules, field, None)
        if found is not None:
            reading.put(field, found, named)


def answers(value: Any) -> str:
    """Return what the loss counts."""
    return "all" if yes(value) else "assistant"


def checkpointing(value: Any) -> bool:
    """Return whether activations are recomputed; they are not off-loaded."""
    if str(value).lower() in ("offload", "offload_disk", "unsloth"):
        raise NotTaken(f"{value!r}: activations are recomputed, and not off-loaded", "", "warning", True)
    return yes(value)


KEYS: dict[str, To | Part | Without] = {
    "base_model": To("model"),
    "trust_remote_code": To("trust_remote_code", yes, note=REMOTE),
    "output_dir": To("output_dir"),
    **dict.fromkeys(("datasets", "pretraining_dataset"), ROWS),
    "test_datasets": HELD,
    "val_set_size": To("data.eval_split", share),
    "sequence_len": To("data.max_length", count, 512, "rows that are longer are cut here; there they are left out"),
    "sample_packing": To("data.packing", yes),
    "train_on_inputs": To("data.train_on", answers),
    "dataset_num_proc": To("data.workers", count),
    "dataset_processes": To("data.workers", count),
    "rl": To("training.task", RL),
    **dict.fromkeys(("rl_beta", "dpo_beta", "orpo_alpha"), To("training.preference_beta", number)),
    **dict.fromkeys(("adapter", "load_in_4bit", "load_in_8bit"), ADAPTERS),
    "lora_r": To("lora.r", count),
    "lora_alpha": To("lora.alpha", count),
    "lora_dropout": To("lora.dropout", number),
    **dict.fromkeys(("lora_target_linear", "lora_target_modules"), MODULES),
    "peft_use_dora": To("lora.use_dora", yes),
    "peft_use_rslora": To("lora.use_rslora", yes),
    "merge_lora": To("lora.merge_adapter", yes),
    **dict.fromkeys(("micro_batch_size", "gradient_accumulation_steps"), SIZES),
    "num_epochs": To("training.num_train_epochs", number),
    "max_steps": To("training.max_steps", steps_or_all),
    "learning_rate": To("training.learning_rate", number),
    "lr_scheduler": To("training.lr_scheduler_type", SCHEDULES),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), WARM),
    "weight_decay": To("training.weight_decay", number),
    "max_grad_norm": To("training.max_grad_norm", number),
    "optimizer": To("training.optimizer", optimizer),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "float32"), FORMAT),
    "gradient_checkpointing": To("training.gradient_checkpointing", checkpointing),
    "seed": To("training.seed"),
    "logging_steps": To("training.logging_steps", count),
    **dict.fromkeys(("eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy"), EVALS),
    "early_stopping_patience": To("training.early_stopping_patience", count),
    "load_best_model_at_end": To("training.load_best_model_at_end", yes),
    **dict.fromkeys(("save_steps", "saves_per_epoch", "save_strategy"), SAVES),
    "save_total_limit": To("recovery.save_total_limit", count),
    "resume_from_checkpoint": To("recovery.resume", resume, off=(None, "", False)),
    "auto_resume_from_checkpoints": Without("a retry goes on from its newest checkpoint that verifies"),
    **dict.fromkeys(("use_wandb", "wandb_project", "use_mlflow", "mlflow_tracking_uri", "use_comet",
                     "use_tensorboard", "use_trackio"), TRACK),
    "deepspeed": WRAP,
    **dict.fromkeys(("fsdp", "fsdp_config", "fsdp_version"), SHARD),
    **WITHOUT,
}  # fmt: skip

AXOLOTL = Tool(
    name="Axolotl",
    option="--from-axolotl",
    source="axolotl-ai-cloud/axolotl@067021c",
    keys=KEYS,
    about="The table has the keys of its schema that its examples use; others are errors with a hint.",
    parts=(
        axolotl_rows,
        method,
        modules,
        batch("micro_batch_size", "gradient_accumulation_steps", (1, 1), ("sample_packing",)),
        warmup("warmup_steps", "warmup_ratio", "max_steps"),
        dtype({"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "float32": "fp32"}),
        evaluations("eval_strategy", "eval_steps", "evals_per_epoch"),
        checkpoints("save_strategy", "save_steps", "saves_per_epoch"),
        tracking({"use_wandb": "wandb", "wandb_project": "wandb", "use_mlflow": "mlflow",
                  "mlflow_tracking_uri": "mlflow", "use_comet": "comet_ml", "use_tensorboard": "tensorboard",
                  "use_trackio": "trackio"}),
        engine(SHIPPED),
    ),
)  # fmt: skip
