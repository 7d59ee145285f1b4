"""Build the real config objects of every preset; prints one JSON object. Run by the tests as a process."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")

import torch
import transformers
from accelerate import FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig

from soup_flows.deepspeed import DEEPSPEED_PRESETS, get_deepspeed_config, resolve_deepspeed_config
from soup_flows.fsdp import FSDP_PRESETS, get_fsdp_config, resolve_fsdp_config


class Recorder(dict):
    """A dict that knows which of its keys were asked for."""

    seen: set[str]

    def __getitem__(self, key: str) -> Any:
        self.__dict__.setdefault("seen", set()).add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def unread(self) -> list[str]:
        return sorted(set(self) - self.__dict__.get("seen", set()))


def parse_deepspeed(cfg: dict[str, Any]) -> dict[str, Any]:
    """Hand a resolved config to DeepSpeed's own parser."""
    from deepspeed.runtime.config import DeepSpeedConfig

    loose = {name: Recorder(cfg[name]) for name in ("aio", "data_types") if name in cfg}
    recorder = Recorder({**cfg, **loose})
    recorder.seen = set()
    parsed = DeepSpeedConfig(recorder)
    zero = parsed.zero_config
    blocks = [zero, zero.offload_param, zero.offload_optimizer, parsed.float16_config, parsed.bfloat16_config]
    models = [type(block) for block in blocks if block is not None]
    deprecated = [
        name
        for name, field in type(zero).model_fields.items()
        if name in cfg["zero_optimization"] and (field.json_schema_extra or {}).get("deprecated")
    ]
    return {
        "unread": recorder.unread()
        + [f"{name}.{key}" for name, block in loose.items() for key in block.unread()],
        "lenient": [model.__name__ for model in models if model.model_config.get("extra") != "forbid"],
        "deprecated": deprecated,
        "stage": int(zero.stage),
        "overlap_comm": zero.overlap_comm,
        "offload_optimizer": zero.offload_optimizer.device if zero.offload_optimizer else "none",
        "offload_param": zero.offload_param.device if zero.offload_param else "none",
        "hpz": zero.zero_hpz_partition_size,
        "gather_on_save": zero.gather_16bit_weights_on_model_save,
        "clipping": parsed.gradient_clipping,
        "bf16": parsed.bfloat16_config.enabled,
        "grad_accum_dtype": parsed.grad_accum_dtype,
        "queue_depth": parsed.aio_config["queue_depth"],
    }


def through_trainer(cfg: dict[str, Any]) -> list[str]:
    """Let transformers fill a raw preset and return the values that are still `"auto"`."""
    args = transformers.TrainingArguments(
        output_dir="unused",
        deepspeed=cfg,
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=cfg["train_micro_batch_size_per_gpu"],
        gradient_accumulation_steps=cfg["gradient_accumulation_steps"],
    )
    model = SimpleNamespace(config=transformers.LlamaConfig(hidden_size=64))
    args.hf_deepspeed_config.trainer_config_finalize(args, model, 10)

    def autos(block: dict[str, Any], prefix: str = "") -> list[str]:
        return [
            found
            for key, value in block.items()
            for found in (
                autos(value, f"{prefix}{key}.")
                if isinstance(value, dict)
                else [prefix + key] * (value == "auto")
            )
        ]

    return autos(args.hf_deepspeed_config.config)


def parse_fsdp(cfg: dict[str, Any]) -> dict[str, Any]:
    """Hand a config to TrainingArguments and accelerate's plugin."""
    recorder = Recorder(cfg["fsdp_config"])
    args = transformers.TrainingArguments(
        output_dir="unused", use_cpu=True, report_to=[], fsdp=True, fsdp_config=recorder
    )
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    parallel = ParallelismConfig(**cfg["parallelism"]) if "parallelism" in cfg else None
    return {
        "unread": sorted(set(cfg["fsdp_config"]) - recorder.__dict__.get("seen", set())),
        "version": plugin.fsdp_version,
        "reshard_after_forward": plugin.reshard_after_forward,
        "cpu_offload": type(plugin.cpu_offload).__name__,
        "state_dict_type": plugin.state_dict_type.name,
        "policy": plugin.auto_wrap_policy.__name__,
        "activation_checkpointing": plugin.activation_checkpointing,
        "mesh": [parallel.dp_replicate_size, parallel.dp_shard_size] if parallel else None,
    }


def step_without_compiler(preset: str) -> str:
    """Train a little with off-loaded states and torch's AdamW, as on a machine without a compiler."""
    import deepspeed

    # On CPU ranks DeepSpeed also compiles its shared-memory collectives, unless told they do not work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    cfg, _ = resolve_deepspeed_config(
        get_deepspeed_config(preset),
        1,
        hidden_size=4,
        dtype="fp32",
        gradient_clipping=1.0,
        pin_memory=False,
        has_compiler=False,
    )
    model = torch.nn.Linear(4, 1)
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=cfg
    )
    losses = []
    for _ in range(4):
        loss = engine(torch.ones(8, 4)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[3] < losses[0], losses
    return type(optimizer.optimizer).__name__


def run_presets(result: dict[str, Any]) -> None:
    """Parse every preset."""
    for preset in DEEPSPEED_PRESETS:
        raw = get_deepspeed_config(preset, nvme_path="/nvme")
        cfg, _ = resolve_deepspeed_config(raw, 1, dtype="bf16", gradient_clipping=0.5, hidden_size=64)
        result["deepspeed"][preset] = {**parse_deepspeed(cfg), "autos_left": through_trainer(raw)}
    for preset in FSDP_PRESETS:
        cfg, _ = resolve_fsdp_config(get_fsdp_config(preset), 4, 2)
        result["fsdp"][preset] = parse_fsdp(cfg)


def run_controls(result: dict[str, Any]) -> None:
    """Parse configs that are wrong on purpose: the checks must be able to see it."""
    cfg, _ = resolve_deepspeed_config(get_deepspeed_config("zero2"), 1, dtype="fp32", gradient_clipping=1.0)
    cfg |= {"gradient_cliping": 1.0, "aio": {"thread_count": 1}}
    cfg["zero_optimization"]["stage3_gather_fp16_weights_on_model_save"] = True
    result["deepspeed"]["wrong"] = parse_deepspeed(cfg)
    fsdp = get_fsdp_config("full_shard")
    fsdp["fsdp_config"] |= {"limit_all_gathers": True}
    result["fsdp"]["wrong"] = parse_fsdp(fsdp)


def complaints(run: Callable[[dict[str, Any]], None], result: dict[str, Any]) -> list[str]:
    """Run it and return what the libraries said about ignored or deprecated settings."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("", "transformers", "accelerate", "DeepSpeed")]
    for logger in loggers:
        logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(result)
    for logger in loggers:
        logger.removeHandler(handler)
    said += [str(item.message) for item in caught]
    return [text for text in said if "deprecat" in text.lower() or "ignor" in text.lower()]


def main() -> None:
    result: dict[str, Any] = {"deepspeed": {}, "fsdp": {}}
    result["complaints"] = complaints(run_presets, result)
    result["complaints_about_wrong"] = complaints(run_controls, result)
    result["optimizer_without_compiler"] = {
        preset: step_without_compiler(preset) for preset in ("zero2_offload", "zero3_offload")
    }
    json.dump(result, sys.__stdout__)


if __name__ == "__main__":
    sys.stdout = sys.stderr  # libraries print; the result stands alone
    main()
