"""Says what the installed DeepSpeed, transformers and peft really do; prints one JSON object.

Run by `test_reality.py` as a process, so that the tests themselves never import torch.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")

from pydantic import BaseModel

from soup_flows.validation.deepspeed_keys import LENIENT, STRICT, TOP
from tests.validation.good_setups import AUTO_BATCH

BATCH = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}


class Recorder(dict):  # type: ignore[type-arg]
    """A dict that knows which of its keys were asked for."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return _Keys(self)


class _Keys:
    """What `keys()` of a `Recorder` returns: membership is recorded too."""

    def __init__(self, owner: Recorder) -> None:
        self.owner = owner

    def __contains__(self, key: object) -> bool:
        return key in self.owner

    def __iter__(self) -> Any:
        return iter(dict.keys(self.owner))


def parse(config: dict[str, Any]) -> Any:
    """Hand a config to DeepSpeed's own parser."""
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig(config)


def refused(call: Callable[[], Any]) -> str:
    """Return the name and text of what a call raises, or an empty string."""
    try:
        call()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def strict_models() -> dict[str, type[BaseModel]]:
    """Return the pydantic model of each strict block."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime import precision_config as precision
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero import offload_config as offload
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "bf16": precision.DeepSpeedBF16Config,
        "fp16": precision.DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": monitor.TensorBoardConfig,
        "wandb": monitor.WandbConfig,
        "csv_monitor": monitor.CSVConfig,
        "comet": monitor.CometConfig,
        "compile": CompileConfig,
        "tensor_parallel": TPTrainingConfig,
        "hybrid_engine": HybridEngineConfig,
    }


def strict_differences() -> dict[str, list[str]]:
    """Return, per strict block, keys that only one of table and model has, and kinds that differ."""
    wrong: dict[str, list[str]] = {}
    kinds = {"bool": "b", "int": "i", "float": "n", "str": "s", "list": "l", "Dict": "d", "List": "l"}
    for block, model in strict_models().items():
        names = set(model.model_fields)
        names |= {field.alias for field in model.model_fields.values() if field.alias}
        found = sorted(names ^ set(STRICT[block]))
        for name, field in model.model_fields.items():
            text = str(field.annotation).removeprefix("<class '").removesuffix("'>").replace("typing.", "")
            bare = text.removeprefix("Optional[").split("[")[0].rstrip("]")
            kind = STRICT[block].get(name, "*")
            if bare in kinds and kind[0] not in (kinds[bare], "*"):
                found.append(f"{name}: {text}, and the table has {kind}")
            if kind != "*" and bare in kinds and kind.endswith("?") != text.startswith("Optional"):
                found.append(f"{name}: {text}, and the table has {kind}")
        if model.model_config.get("extra") != "forbid":
            found.append("is not strict")
        if found:
            wrong[block] = found
    return wrong


def lenient_keys() -> dict[str, list[str]]:
    """Return the keys that DeepSpeed looks up in each block it does not check."""
    blocks = {name: Recorder() for name in LENIENT}
    blocks["optimizer"] = Recorder({"type": "adamw", "params": {}})
    blocks["scheduler"] = Recorder({"type": "WarmupLR", "params": {}})
    blocks["torch_autocast"] = Recorder({"dtype": "bfloat16", "lower_precision_safe_modules": ["a"]})
    parse({**BATCH, **blocks})
    return {name: sorted(block.asked) for name, block in blocks.items()}


def top_keys() -> list[str]:
    """Return the top-level keys that DeepSpeed's parser looks up, removed ones left out."""
    from deepspeed.runtime import config as module

    recorder = Recorder(BATCH)
    parse(recorder)
    return sorted(recorder.asked - set(module._REMOVED_TOP_LEVEL_CONFIG_KEYS))


def removed_keys() -> list[str]:
    """Return what DeepSpeed refuses as removed."""
    from deepspeed.runtime import config as module

    zero = [f"zero_optimization.{key}" for key in module._REMOVED_ZERO_CONFIG_KEYS]
    return sorted([*module._REMOVED_TOP_LEVEL_CONFIG_KEYS, *zero])


def behaviour() -> dict[str, Any]:
    """Return what DeepSpeed does with the configs that the rules are about."""
    zero: dict[str, Any] = {"stage": 2}

    def with_zero(**values: Any) -> dict[str, Any]:
        return {**BATCH, "zero_optimization": {**zero, **values}}

    nvme = parse(with_zero(offload_optimizer={"device": "nvme"}))
    return {
        "unknown top key": refused(lambda: parse({**BATCH, "gradient_cliping": 1})),
        "unknown zero key": refused(lambda: parse(with_zero(overlap_com=True))),
        "unknown aio key": refused(lambda: parse({**BATCH, "aio": {"thread_count": 1}})),
        "removed key": refused(lambda: parse({**BATCH, "amp": {"enabled": False}})),
        "product": refused(lambda: parse({**BATCH, "train_batch_size": 5})),
        "no batch": refused(lambda: parse({"gradient_accumulation_steps": 1})),
        "clipping": parse(BATCH).gradient_clipping,
        "auto stage": refused(lambda: parse({**BATCH, "zero_optimization": {"stage": "auto"}})),
        "auto bucket": str(parse(with_zero(sub_group_size="auto")).zero_config.sub_group_size),
        "both dtypes": refused(
            lambda: parse({**BATCH, "bf16": {"enabled": True}, "fp16": {"enabled": True}})
        ),
        "text number": refused(lambda: parse(with_zero(reduce_bucket_size="2e8"))),
        "offload_param at 2": refused(lambda: parse(with_zero(offload_param={"device": "cpu"}))),
        "nvme at 2": str(nvme.zero_config.offload_optimizer.device),
        "nvme without path": str(nvme.zero_config.offload_optimizer.nvme_path),
        "device": refused(lambda: parse(with_zero(offload_optimizer={"device": "disk"}))),
        "ratio at 2": refused(lambda: parse(with_zero(offload_optimizer={"device": "cpu", "ratio": 0.5}))),
        "norm at 3": refused(lambda: parse(with_zero(stage=3, compute_grad_norm=False))),
        "two names": refused(lambda: parse(with_zero(cpu_offload=True, offload_optimizer={"device": "cpu"}))),
        "communication": refused(lambda: parse({**BATCH, "communication_data_type": "int8"})),
        "sum at 3": refused(lambda: parse({**with_zero(stage=3), "gradient_allreduce_op": "sum"})),
        "overlap default": [parse(with_zero(stage=stage)).zero_config.overlap_comm for stage in (1, 2, 3)],
    }


def optimizers() -> dict[str, Any]:
    """Return what DeepSpeed calls its optimizers, and whether torch has the removed ones."""
    import torch
    from deepspeed.runtime import config as module
    from deepspeed.runtime.engine import DeepSpeedEngine

    source = inspect.getsource(DeepSpeedEngine._configure_basic_optimizer)
    return {
        "built": sorted(module.DEEPSPEED_OPTIMIZERS),
        "one bit": [
            name for name in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb") if hasattr(torch.optim, name)
        ],
        "norm refused": "max_grad_norm" in source,
    }


def parameters() -> dict[str, list[str]]:
    """Return what the schedules and the three Adams take."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime import lr_schedules

    def names(kind: type) -> set[str]:
        return set(inspect.signature(kind.__init__).parameters) - {
            "self",
            "params",
            "model_params",
            "optimizer",
        }

    adam = names(torch.optim.AdamW) | names(FusedAdam) | names(DeepSpeedCPUAdam)
    schedules = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
    found = {name: sorted(names(getattr(lr_schedules, name))) for name in schedules}
    return {**found, "adam": sorted(adam)}


def trainer(config: dict[str, Any], **arguments: Any) -> str:
    """Return what TrainingArguments and its second stage say to a DeepSpeed config."""
    import transformers

    class Model:
        config = transformers.LlamaConfig(hidden_size=64)

    def call() -> None:
        args = transformers.TrainingArguments(
            output_dir="unused", deepspeed=config, use_cpu=True, report_to=[], **arguments
        )
        args.hf_deepspeed_config.trainer_config_finalize(args, Model, 10)
        parse(args.hf_deepspeed_config.config)

    return refused(call)


def through_trainer() -> dict[str, str]:
    """Return the answers of transformers to conflicts between JSON and run."""
    good: dict[str, Any] = {**AUTO_BATCH, "zero_optimization": {"stage": 2}}
    lr = {"type": "AdamW", "params": {"lr": 1e-3}}
    return {
        "good": trainer({**good}),
        "dtype": trainer({**good, "bf16": {"enabled": True}}),
        "clipping": trainer({**good, "gradient_clipping": 0.5}),
        "optimizer": trainer({**good, "optimizer": lr}, learning_rate=2e-5),
        "no zero": trainer({**AUTO_BATCH}),
        "no accumulation": trainer(
            {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": "auto",
                "zero_optimization": {"stage": 2},
            },
            gradient_accumulation_steps=2,
        ),
    }


def fsdp(**config: Any) -> dict[str, Any]:
    """Return the plugin arguments that transformers makes of an `fsdp_config`, or what it raises."""
    import transformers

    found: dict[str, Any] = {}

    def call() -> None:
        args = transformers.TrainingArguments(
            output_dir="unused", use_cpu=True, report_to=[], fsdp=True, fsdp_config=dict(config)
        )
        found.update({key: str(value) for key, value in args.fsdp_plugin_args.items()})

    error = refused(call)
    return {"error": error} if error else found


def fsdp_behaviour() -> dict[str, Any]:
    """Return what transformers does with the keys that the FSDP rules are about."""
    import transformers

    source = inspect.getsource(transformers.TrainingArguments._process_fsdp_args)
    return {
        "good": fsdp(version=2),
        "unknown": fsdp(version=2, offload_params=True),
        "version 1 key": fsdp(version=2, backward_prefetch="BACKWARD_PRE"),
        "version 3": fsdp(version=3),
        "text": fsdp(version=2, reshard_after_forward="FULL_SHARD"),
        "false as text": fsdp(version=2, cpu_offload="false"),
        "lower case": fsdp(version=2, auto_wrap_policy="transformer_based_wrap"),
        "checkpointing": fsdp(version=2, activation_checkpointing=True),
        "source": source,
    }


def accelerate_fields() -> list[str]:
    """Return the keys that accelerate takes in its YAML."""
    from accelerate.commands.config.config_args import ClusterConfig

    return sorted(ClusterConfig.__dataclass_fields__)


def main() -> None:
    """Print everything."""
    logging.disable(logging.WARNING)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        result = {
            "strict differences": strict_differences(),
            "lenient": lenient_keys(),
            "top": top_keys(),
            "table": sorted(TOP),
            "removed": removed_keys(),
            "behaviour": behaviour(),
            "optimizers": optimizers(),
            "parameters": parameters(),
            "trainer": through_trainer(),
            "fsdp": fsdp_behaviour(),
            "accelerate": accelerate_fields(),
        }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
