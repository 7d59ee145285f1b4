"""Reads an `accelerate` YAML and says the same in this package's settings.

`accelerate launch` would turn the file into environment variables; a run here is planned from it instead.
Checked against accelerate 1.15, `commands/config/config_args.py` and `commands/launch.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from soup_flows.accelerate_keys import DEEPSPEED_KEYS, FSDP_KEYS, IGNORED, TOP_KEYS, UNSUPPORTED
from soup_flows.errors import Problem, Severity, nearest, refuse
from soup_flows.user_file import BadFile, expanded
from soup_flows.user_yaml import read_yaml

FIELD = "accelerate_config"
MAX_BYTES = 16 * 1024
"""Largest file that is read, bytes; real ones have one or two kilobytes."""

SOURCE = "accelerate/commands/config/config_args.py, commands/launch.py"


def read_accelerate_config(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Read an `accelerate` YAML (or JSON) file.

    Args:
        path: a regular file with one mapping, as `accelerate config` writes it.

    Returns:
        Values for `TrainingSpec` (`gpus`, `device`, `training.dtype` as nested mappings, `deepspeed`, `fsdp`,
        `deepspeed_config`, `strategy`, ...), to be merged below what the user gives besides; and what cannot be
        said in them or is ignored, errors first.

    Raises:
        Refused: the file cannot be read or holds no mapping.
    """
    try:
        values = read_yaml(path, MAX_BYTES)
    except BadFile as bad:
        raise refuse("AC001", FIELD, str(bad), bad.fix) from None
    reader = _Reader(values, Path(path).parent)
    for part in (reader.keys, reader.machine, reader.dtype, reader.engine):
        part()
    order: tuple[Severity, ...] = ("error", "warning", "note")
    return reader.spec, sorted(reader.problems, key=lambda p: order.index(p.severity))


def fsdp_settings(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Read an `fsdp_config` block alone, as other tools have it too; names with or without `fsdp_`.

    Returns:
        As `read_accelerate_config`.
    """
    reader = _Reader({"distributed_type": "FSDP", "fsdp_config": block}, Path())
    reader.engine()
    return reader.spec, reader.problems


def _off(value: object) -> bool:
    """Whether a value says nothing, or no."""
    return not value or (isinstance(value, str) and value.lower() in ("no", "none", "false"))


class _Reader:
    """Turns the mapping into spec values, step by step.

    Attributes:
        spec: values for `TrainingSpec`.
        problems: what was found.
    """

    def __init__(self, values: Mapping[str, Any], folder: Path) -> None:
        self.values, self.folder = values, folder
        self.spec: dict[str, Any] = {}
        self.problems: list[Problem] = []

    def say(self, rule: str, severity: Severity, key: str, message: str, fix: str = "") -> None:
        """Add a problem about one key of the file."""
        field = f"{FIELD}.{key}"
        self.problems.append(
            Problem(id=rule, severity=severity, field=field, message=message, fix=fix, source=SOURCE)
        )

    def training(self, name: str, value: Any) -> None:
        """Set a value of the group `training`."""
        self.spec.setdefault("training", {})[name] = value

    def block(self, name: str) -> dict[str, Any]:
        """Return a block of the file, empty where there is none."""
        value = self.values.get(name)
        return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}

    def keys(self) -> None:
        """Report unknown, ignored and unsupported keys."""
        tables = (
            ("", self.values, TOP_KEYS),
            ("deepspeed_config", self.block("deepspeed_config"), DEEPSPEED_KEYS),
        )
        for block, values, known in (*tables, ("fsdp_config", self.block("fsdp_config"), FSDP_KEYS)):
            for key in values:
                path = f"{block}.{key}".lstrip(".")
                if key not in known:
                    hint = nearest(key, known) or "remove it"
                    self.say("AC002", "error", path, f"{key!r} is not a key that accelerate knows", hint)
                elif path in IGNORED and not _off(values[key]) and values[key] != "standard":
                    self.say(
                        "AC003", "note", path, f"{path}={values[key]!r} is not used here: {IGNORED[path]}"
                    )
        for name, why in UNSUPPORTED.items():
            if not _off(self.values.get(name)):
                self.say("AC004", "error", name, f"{name}: {why}", "remove it")

    def machine(self) -> None:
        """Read machines, processes and the device."""
        environment = str(self.values.get("compute_environment", "LOCAL_MACHINE"))
        if environment != "LOCAL_MACHINE":
            self.say(
                "AC004",
                "error",
                "compute_environment",
                f"{environment} is not supported",
                "use LOCAL_MACHINE",
            )
        machines, ranks = self.values.get("num_machines", 1), self.values.get("num_processes")
        if machines not in (1, None):
            message = f"num_machines={machines!r}: a run here uses one machine"
            self.say("AC004", "error", "num_machines", message, "set it to 1")
        if isinstance(ranks, int) and not isinstance(ranks, bool) and ranks >= 1:
            self.spec["gpus"] = ranks
        elif ranks not in (None, -1):
            self.say(
                "AC005", "error", "num_processes", f"num_processes is {ranks!r}", "write a whole number >= 1"
            )
        if self.values.get("use_cpu") is True or self.values.get("distributed_type") == "MULTI_CPU":
            self.spec["device"] = "cpu"
        chosen = self.values.get("gpu_ids")
        if chosen not in (None, "all"):
            message = f"gpu_ids={chosen!r} is not read"
            self.say("AC003", "warning", "gpu_ids", message, f"set CUDA_VISIBLE_DEVICES={chosen}")

    def dtype(self) -> None:
        """Read the mixed precision."""
        asked = self.values.get("mixed_precision")
        if asked is None and not _off(self.values.get("fp16")):
            asked = "fp16"  # the old name, as `process_config` of accelerate converts it
        # An unquoted `no` is false in YAML.
        known = {"no": "fp32", False: "fp32", "bf16": "bf16", "fp16": "fp16"}
        if asked is None:
            return
        if isinstance(asked, str | bool) and asked in known:
            self.training("dtype", known[asked])
        else:
            hint = nearest(str(asked), ["no", "fp16", "bf16"]) or "use no, fp16 or bf16"
            self.say("AC005", "error", "mixed_precision", f"mixed_precision is {asked!r}", hint)

    def engine(self) -> None:
        """Read what wraps the model."""
        kind = self.values.get("distributed_type")
        kinds: dict[str, Callable[[], None]] = {
            "NO": lambda: self.spec.update(strategy="single", gpus=1),
            "MULTI_GPU": lambda: self.spec.update(strategy="ddp"),
            "MULTI_CPU": lambda: self.spec.update(strategy="ddp"),
            "DEEPSPEED": self._deepspeed,
            "FSDP": self._fsdp,
        }
        name = "NO" if kind is False else str(kind)
        if name in kinds:
            kinds[name]()
        elif kind is None:
            self.say(
                "AC005", "error", "distributed_type", "distributed_type is missing", f"use {', '.join(kinds)}"
            )
        else:
            hint = nearest(name, kinds) or f"use {', '.join(kinds)}"
            self.say("AC004", "error", "distributed_type", f"{name} is not supported", hint)

    def _deepspeed(self) -> None:
        block = self.block("deepspeed_config")
        file = block.get("deepspeed_config_file")
        if file not in (None, "none"):
            given = expanded(str(file))
            beside = self.folder / given
            self.spec["deepspeed_config"] = str(beside if not given.exists() and beside.exists() else given)
            return
        stage = block.get("zero_stage", 2)
        offload = [str(block.get(f"offload_{what}_device") or "none") for what in ("optimizer", "param")]
        if stage == 0:
            self.spec["strategy"] = "ddp"
        elif stage in (1, 2, 3) and not isinstance(stage, bool):
            self._preset(stage, offload[0], offload[1], block)
        else:
            self.say(
                "AC005",
                "error",
                "deepspeed_config.zero_stage",
                f"zero_stage is {stage!r}",
                "use 0, 1, 2 or 3",
            )
        clip = block.get("gradient_clipping")
        if isinstance(clip, int | float) and not isinstance(clip, bool):
            self.training("max_grad_norm", float(clip))

    def _preset(self, stage: int, optimizer: str, param: str, block: Mapping[str, Any]) -> None:
        """Name the preset of a stage and its off-load devices."""
        for what, device in (("optimizer", optimizer), ("param", param)):
            if device not in ("none", "cpu", "nvme"):
                key = f"deepspeed_config.offload_{what}_device"
                hint = nearest(device, ["none", "cpu", "nvme"]) or "use none, cpu or nvme"
                self.say("AC005", "error", key, f"offload_{what}_device is {device!r}", hint)
        if stage < 3 and param != "none":
            key = "deepspeed_config.offload_param_device"
            self.say(
                "AC006",
                "error",
                key,
                f"parameters are off-loaded at stage 3 only, not {stage}",
                "use zero_stage: 3",
            )
        if stage == 1 and optimizer != "none":
            message = "off-load at stage 1 has no preset: zero2_offload is taken"
            self.say("AC006", "warning", "deepspeed_config.offload_optimizer_device", message)
        if stage < 3:
            self.spec["deepspeed"] = "zero2_offload" if optimizer != "none" else f"zero{stage}"
        elif "nvme" in (optimizer, param):
            self.spec["deepspeed"] = "zero3_nvme"
            paths = [block.get(f"offload_{what}_nvme_path") for what in ("optimizer", "param")]
            self.spec["nvme_path"] = next((str(p) for p in paths if p not in (None, "none")), None)
        else:
            self.spec["deepspeed"] = "zero3_offload" if "cpu" in (optimizer, param) else "zero3"
        if stage == 3 and optimizer != param:
            message = (
                f"the preset {self.spec['deepspeed']} off-loads optimizer and parameters, not one of them"
            )
            self.say("AC006", "warning", "deepspeed_config.offload_param_device", message)

    def _fsdp(self) -> None:
        block = {key.removeprefix("fsdp_"): value for key, value in self.block("fsdp_config").items()}
        strategy = str(block.get("sharding_strategy", "")).upper()
        numbered = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
        strategy = numbered.get(strategy, strategy)
        if not strategy:
            kept = str(block.get("reshard_after_forward", True)).upper()
            strategy = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(kept, kept)
        offload = str(block.get("offload_params", block.get("cpu_offload", False))).lower() == "true"
        presets = {"FULL_SHARD": "full_shard", "SHARD_GRAD_OP": "shard_grad", "HYBRID_SHARD": "hybrid_shard"}
        if strategy == "NO_SHARD":
            self.spec["strategy"] = "ddp"
        elif strategy not in presets:
            hint = nearest(strategy, presets) or f"use {', '.join(presets)}"
            key = "fsdp_config.fsdp_sharding_strategy"
            self.say("AC005", "error", key, f"{strategy!r} is not supported", hint)
        elif offload and strategy != "FULL_SHARD":
            message = f"{strategy} with CPU off-load has no preset: full_offload is taken"
            self.say("AC006", "warning", "fsdp_config.fsdp_offload_params", message)
            self.spec["fsdp"] = "full_offload"
        else:
            self.spec["fsdp"] = "full_offload" if offload else presets[strategy]
        if str(block.get("activation_checkpointing", False)).lower() == "true":
            self.training("gradient_checkpointing", True)
        self._fsdp_differences(block)

    def _fsdp_differences(self, block: Mapping[str, Any]) -> None:
        """Name what FSDP does otherwise here than the file says."""
        if block.get("version") not in (2, "2"):
            message = "the file is for FSDP1; this package runs FSDP2, with the same sharding"
            self.say("AC006", "note", "fsdp_config.fsdp_version", message)
        if str(block.get("state_dict_type", "FULL_STATE_DICT")).upper() != "FULL_STATE_DICT":
            message = "the model is saved whole (FULL_STATE_DICT), so that from_pretrained opens it"
            self.say("AC006", "note", "fsdp_config.fsdp_state_dict_type", message)
        policy = str(block.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")).upper()
        if policy != "TRANSFORMER_BASED_WRAP":
            message = f"{policy}: the model is wrapped layer by layer instead"
            self.say("AC006", "warning", "fsdp_config.fsdp_auto_wrap_policy", message)
