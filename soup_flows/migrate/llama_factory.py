"""LLaMA-Factory: the YAML of `llamafactory-cli train`.

Keys are those of `llamafactory/hparams/` (hiyouga/LLaMA-Factory at ff6d4d1, 0.9.6.dev0, 2026-08-18) and the
`TrainingArguments` of Transformers below them, with their defaults.
"""

from __future__ import annotations

from typing import Any

from soup_flows.migrate.common import REMOTE
from soup_flows.migrate.convert import (
    SCHEDULES,
    count,
    inverted,
    number,
    one_of,
    optimizer,
    resume,
    share,
    steps_or_all,
    target_modules,
    trackers,
    yes,
)
from soup_flows.migrate.engine import SHARD, WRAP, engine
from soup_flows.migrate.llama_factory_without import WITHOUT
from soup_flows.migrate.parts import batch, checkpoints, dtype, evaluations, warmup
from soup_flows.migrate.reading import Reading
from soup_flows.migrate.rows import llama_factory_rows
from soup_flows.migrate.values import NotTaken, Part, To, Tool, Without

TASK = Part(("training.task",), "stage; for dpo its loss: sigmoid is dpo, orpo is orpo")
ADAPTERS = Part(("training.method",), "lora (where nothing is written), full; lora over 4 bits is qlora")
SCALE = Part(("lora.r", "lora.alpha"), "rank 8 where it is not written; alpha is then twice the rank")
SIZES = Part(
    ("training.per_device_train_batch_size", "training.global_batch_size"),
    "rows x passes x GPUs; 8 and 1 where they are not written",
)
WARM = Part(
    ("training.warmup_ratio",),
    "a share of the steps (none where it is not written); a number of steps needs max_steps",
)
SAVES = Part(("recovery.save_steps",), "steps; `no` is 0; once a pass is not known beforehand")
EVALS = Part(("training.eval_steps",), "steps; once a pass is not known beforehand")
FORMAT = Part(("training.dtype",), "the one that is true; fp32 where none is, or nothing is written")
ROWS = Part(("dataset", "data.eval_dataset"), "the file that dataset_info.json names; one data set")

SHIPPED = {
    "ds_z0_config": ("ddp", "stage 0 shards nothing"),
    "ds_z2_config": ("zero2", ""),
    "ds_z2_offload_config": ("zero2_offload", ""),
    "ds_z2_autotp_config": ("", "tensor parallelism is not there"),
    "ds_z3_config": ("zero3", ""),
    "ds_z3_offload_config": ("zero3_offload", ""),
    "ds_z3_fp8_config": ("", "training in fp8 is not there"),
}
"""Stem of a file in `examples/deepspeed/` -> the preset, and what differs."""


def task(reading: Reading) -> None:
    """Read `stage`, and the loss of `dpo`."""
    field = "training.task"
    stages = {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "kto"}
    read = one_of(stages, others=dict.fromkeys(("rm", "ppo"), "use sft, pt, dpo or kto"))
    found = reading.read("stage", read, field, None)
    loss = reading.values.get("pref_loss", "sigmoid")
    keys = ["stage"]
    if found == "dpo" and "pref_loss" in reading.values:
        losses = {"sigmoid": "dpo", "orpo": "orpo"}
        others = dict.fromkeys(("hinge", "ipo", "kto_pair", "simpo"), "use sigmoid or orpo")
        found = reading.read("pref_loss", one_of(losses, others=others), field, None)
        keys.append("pref_loss")
    elif "pref_loss" in reading.values:
        reading.say("pref_loss", "MIG003", "note", f"pref_loss={loss!r} counts for stage dpo alone")
    if found is not None:
        reading.put(field, found, *keys)


def method(reading: Reading) -> None:
    """Read `finetuning_type`, the bits of the base, and the adapter's size."""
    field, kinds = "training.method", {"full": "full", "lora": "lora"}
    read = one_of(kinds, others=dict.fromkeys(("freeze", "oft"), "use lora or full"))
    found = reading.read(
        "finetuning_type", read, field, None if reading.written("finetuning_type") else "lora"
    )
    if found is None:
        return
    keys, bits = ["finetuning_type"], reading.read("quantization_bit", number, field, 0)
    if bits == 4 and found == "lora":
        found = "qlora"
        keys.append("quantization_bit")
    elif bits == 8 and found == "lora":
        message = "a base in 8 bits is not there; it is loaded as it is, which needs more memory"
        wrong = NotTaken(message, "nothing, where the plan fits; else quantization_bit: 4", "warning")
        reading.wrong("quantization_bit", wrong, field)
    elif bits:
        message = f"{bits} bits with finetuning_type {found!r} are not there"
        reading.wrong("quantization_bit", NotTaken(message, "use 4 with finetuning_type: lora"), field)
    reading.put(field, found, *keys, written="finetuning_type" in reading.values)
    if found != "full":
        rank = reading.read("lora_rank", count, "lora.r", 8)
        reading.put("lora.r", rank, "lora_rank", written="lora_rank" in reading.values)
        alpha = reading.read("lora_alpha", count, "lora.alpha", 2 * rank)
        reading.put("lora.alpha", alpha, "lora_alpha", written=reading.written("lora_alpha"))


def answers(value: Any) -> str:
    """Return what the loss counts."""
    return "all" if yes(value) else "assistant"


def kernel(value: Any) -> None:
    """Check the library of the 4 bits; bitsandbytes is the one there is."""
    one_of({"bnb": None, "bitsandbytes": None}, others=dict.fromkeys(("hqq", "eetq"), "use bnb"))(value)


KEYS: dict[str, To | Part | Without] = {
    "model_name_or_path": To("model"),
    "trust_remote_code": To("trust_remote_code", yes, note=REMOTE),
    "output_dir": To("output_dir"),
    **dict.fromkeys(("dataset", "eval_dataset", "dataset_dir"), ROWS),
    "val_size": To("data.eval_split", share),
    "cutoff_len": To("data.max_length", count, 2048),
    "packing": To("data.packing", yes),
    "neat_packing": To("data.packing", yes, off=(None, "", False)),
    "train_on_prompt": To("data.train_on", answers),
    "preprocessing_num_workers": To("data.workers", count),
    **dict.fromkeys(("stage", "pref_loss"), TASK),
    "pref_beta": To("training.preference_beta", number),
    **dict.fromkeys(("finetuning_type", "quantization_bit"), ADAPTERS),
    "quantization_method": To("training.method", kernel, note="bitsandbytes"),
    **dict.fromkeys(("lora_rank", "lora_alpha"), SCALE),
    "lora_dropout": To("lora.dropout", number),
    "lora_target": To("lora.target_modules", target_modules),
    "use_dora": To("lora.use_dora", yes),
    "use_rslora": To("lora.use_rslora", yes),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), SIZES),
    "num_train_epochs": To("training.num_train_epochs", number, 3.0),
    "max_steps": To("training.max_steps", steps_or_all),
    "learning_rate": To("training.learning_rate", number, 5e-5),
    "lr_scheduler_type": To("training.lr_scheduler_type", SCHEDULES, "linear"),
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), WARM),
    "weight_decay": To("training.weight_decay", number),
    "max_grad_norm": To("training.max_grad_norm", number),
    "optim": To("training.optimizer", optimizer),
    **dict.fromkeys(("bf16", "fp16", "pure_bf16"), FORMAT),
    "disable_gradient_checkpointing": To("training.gradient_checkpointing", inverted),
    "gradient_checkpointing": To("training.gradient_checkpointing", yes),
    "use_cpu": Part(("device",), "true is cpu"),
    "seed": To("training.seed"),
    "logging_steps": To("training.logging_steps", count),
    **dict.fromkeys(("eval_steps", "eval_strategy", "evaluation_strategy"), EVALS),
    "early_stopping_steps": To("training.early_stopping_patience", count),
    "load_best_model_at_end": To("training.load_best_model_at_end", yes),
    **dict.fromkeys(("save_steps", "save_strategy"), SAVES),
    "save_total_limit": To("recovery.save_total_limit", count),
    "resume_from_checkpoint": To("recovery.resume", resume, off=(None, "", False)),
    "report_to": To("training.report_to", trackers),
    "deepspeed": WRAP,
    **dict.fromkeys(("fsdp", "fsdp_config"), SHARD),
    **WITHOUT,
}


def device(reading: Reading) -> None:
    """Read `use_cpu`."""
    if reading.read("use_cpu", yes, "device", False):
        reading.put("device", "cpu", "use_cpu")


LLAMA_FACTORY = Tool(
    name="LLaMA-Factory",
    option="--from-llama-factory",
    source="hiyouga/LLaMA-Factory@ff6d4d1",
    keys=KEYS,
    about="The table has the keys of its schema that its examples use; others are errors with a hint.",
    parts=(
        llama_factory_rows,
        task,
        method,
        batch(
            "per_device_train_batch_size", "gradient_accumulation_steps", (8, 1), ("packing", "neat_packing")
        ),
        device,
        warmup("warmup_steps", "warmup_ratio", "max_steps", 0.0),
        dtype({"bf16": "bf16", "pure_bf16": "bf16", "fp16": "fp16"}, "fp32"),
        evaluations("eval_strategy", "eval_steps"),
        checkpoints("save_strategy", "save_steps"),
        engine(SHIPPED),
    ),
)
