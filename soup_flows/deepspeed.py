"""DeepSpeed presets: the full JSON of each, and how configs are written and read.

Every key below was checked against DeepSpeed 0.19.8, transformers 5.24 and accelerate 1.15: unknown top-level
keys are ignored without a word there, so `tests/core/test_deepspeed.py` records which ones are really read.
"""

from __future__ import annotations

import copy
import json
import math
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from soup_flows.deepspeed_file import load_deepspeed_config
from soup_flows.deepspeed_resolve import check_nvme_path, resolve_deepspeed_config, with_nvme_path
from soup_flows.errors import nearest, refuse
from soup_flows.paths import write_atomic

__all__ = [
    "DEEPSPEED_ALIASES",
    "DEEPSPEED_PRESETS",
    "get_deepspeed_config",
    "load_deepspeed_config",
    "resolve_deepspeed_config",
    "write_deepspeed_config",
]

DEEPSPEED_PRESETS: Mapping[str, str] = MappingProxyType(
    {
        "zero1": "Shards the optimizer state; for models that fit with their gradients on every GPU.",
        "zero2": "Shards optimizer state and gradients; the first choice when the weights fit on every GPU.",
        "zero2_offload": "zero2 with the optimizer state and its update in CPU memory; for when only that is "
        "too large for the GPUs.",
        "zero3": "Shards parameters, gradients and optimizer state; for models whose weights do not fit on "
        "one GPU.",
        "zero3_offload": "zero3 with optimizer state and parameters in CPU memory; for models too large for "
        "all GPUs together, slower by the traffic over PCIe.",
        "zero3_nvme": "zero3 with optimizer state and parameters on a local NVMe disk (ZeRO-Infinity); the "
        "last resort when CPU memory is too small as well.",
        "zero++": "zero3 with a second copy of the weights sharded inside each node, so that the backward "
        "pass gathers them without crossing nodes; for several nodes on a slow network.",
    }
)
"""Preset name -> what it shards and when to use it."""

DEEPSPEED_ALIASES: Mapping[str, str] = MappingProxyType({"zero_pp": "zero++"})
"""Other spellings of preset names."""

_COMMON: dict[str, Any] = {
    # Concrete numbers for one GPU: `resolve_deepspeed_config` adapts them to the run.
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    # Left out, DeepSpeed clips at 1.0 on its own (runtime/constants.py), whatever max_grad_norm says.
    "gradient_clipping": "auto",
    # Never a literal: T4 and V100 have no bf16, and CPU rehearsals run in fp32.
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    # Sums of micro batches in bf16 lose small terms.
    "data_types": {"grad_accum_dtype": "fp32"},
    # DeepSpeed's own progress lines cost a synchronisation each.
    "steps_per_print": 1_000_000_000,
    "wall_clock_breakdown": False,
    # No optimizer and no scheduler: Trainer's own keep weight decay off biases and norms.
}

_ZERO2: dict[str, Any] = {
    "stage": 2,
    # DeepSpeed's default at stages 1 and 2; wrong gradients were reported with it on
    # (deepspeedai/DeepSpeed#5294, #7965, #8061).
    "overlap_comm": False,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 200_000_000,
    "allgather_partitions": True,
    "allgather_bucket_size": 200_000_000,
}

_ZERO3: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    # transformers fills these three from the model's hidden size h: h*h, 0.9*h*h, 10*h.
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "sub_group_size": 1_000_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    # Without it the final save has no model file.
    "stage3_gather_16bit_weights_on_model_save": True,
}

# The same blocks serve CPU and NVMe. Verified for DeepSpeed 0.19.8: with device "cpu" the NVMe keys are
# fields of the same pydantic models (runtime/zero/offload_config.py), so they are accepted, null for the path
# included, and wait for device "nvme"; `aio` is parsed at top level for every device
# (runtime/swap_tensor/aio_config.py) and handed to the swappers only with "nvme".
_OFFLOAD_OPTIMIZER: dict[str, Any] = {
    "device": "cpu",
    "pin_memory": True,
    "nvme_path": None,
    "buffer_count": 4,  # parameter, gradient and Adam's two states
    "pipeline_read": False,
    "pipeline_write": False,
    "fast_init": False,
}
_OFFLOAD_PARAM: dict[str, Any] = {
    "device": "cpu",
    "pin_memory": True,
    "nvme_path": None,
    "buffer_count": 5,
    # Elements; must hold the largest parameter shard of a rank (deepspeedai/DeepSpeed#3506).
    "buffer_size": 200_000_000,
    "max_in_cpu": 1_000_000_000,
}
_AIO: dict[str, Any] = {
    "block_size": 1_048_576,
    "queue_depth": 16,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}

_ON_CPU = {"offload_optimizer": _OFFLOAD_OPTIMIZER, "offload_param": _OFFLOAD_PARAM}
_ON_NVME = {name: {**block, "device": "nvme"} for name, block in _ON_CPU.items()}

_PRESETS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {**_ZERO2, "stage": 1}},
    "zero2": {"zero_optimization": _ZERO2},
    "zero2_offload": {
        "zero_optimization": {**_ZERO2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    },
    "zero3": {"zero_optimization": _ZERO3},
    "zero3_offload": {"zero_optimization": {**_ZERO3, **_ON_CPU}, "aio": _AIO},
    # The swap buffers have the size of the largest sub-group.
    "zero3_nvme": {"zero_optimization": {**_ZERO3, "sub_group_size": 100_000_000, **_ON_NVME}, "aio": _AIO},
    "zero++": {
        "zero_optimization": {
            **_ZERO3,
            # 1 is off; becomes the ranks per node once there are several nodes.
            "zero_hpz_partition_size": 1,
            # Lossy, and need the CUDA quantizer op: yours to switch on; checked against dtype and nodes.
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
        }
    },
}


def get_deepspeed_config(preset: str, *, nvme_path: str | None = None) -> dict[str, Any]:
    """Return the full DeepSpeed JSON of a preset, with batch numbers for one GPU.

    Args:
        preset: a name of `DEEPSPEED_PRESETS` or `DEEPSPEED_ALIASES`.
        nvme_path: absolute folder on a local NVMe disk. `zero3_nvme` needs it: without, its `nvme_path` is
            null, which `resolve_deepspeed_config` and `write_deepspeed_config` refuse. In `zero3_offload` it
            is written beside the CPU device, ready to be switched on.

    Returns:
        A fresh dict that the caller may change.

    Raises:
        Refused: a ValueError; unknown name (lists all, and the nearest), or a path that cannot be used.
    """
    name = DEEPSPEED_ALIASES.get(preset, preset) if isinstance(preset, str) else preset
    if not isinstance(name, str) or name not in _PRESETS:
        names = [*DEEPSPEED_PRESETS, *DEEPSPEED_ALIASES]
        raise refuse(
            "DSP001",
            "deepspeed",
            f"{preset!r} is not a DeepSpeed preset",
            " ".join(filter(None, [nearest(str(preset), names), "presets: " + ", ".join(names)])),
        )
    cfg = copy.deepcopy({**_COMMON, **_PRESETS[name]})
    return cfg if nvme_path is None else with_nvme_path(cfg, nvme_path)


def write_deepspeed_config(
    cfg_or_preset: Mapping[str, Any] | str, directory: str | os.PathLike[str] | None = None
) -> str:
    """Write a config as strict JSON, atomically and readable by its owner only.

    Args:
        cfg_or_preset: a config, or the name of a preset.
        directory: where the file is made; the folder for temporary files when empty. Created if missing.

    Returns:
        The absolute path of the new file, `ds_config_<random>.json`.

    Raises:
        Refused: a ValueError; unknown preset, off-load to NVMe without a path, or a value JSON cannot hold
            (NaN, infinity, a set, a key that is not text), with its place.
        OSError: the folder cannot be written.
    """
    cfg = get_deepspeed_config(cfg_or_preset) if isinstance(cfg_or_preset, str) else cfg_or_preset
    if not isinstance(cfg, Mapping):
        raise refuse(
            "DSF001", "deepspeed_config", f"got {type(cfg).__name__}", "give a dict or a preset name"
        )
    _check_json(cfg, "")
    check_nvme_path(cfg)
    folder = Path(directory if directory is not None else tempfile.gettempdir()).absolute()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"ds_config_{secrets.token_hex(8)}.json"
    write_atomic(path, json.dumps(cfg, indent=2, allow_nan=False) + "\n")
    return str(path)


def _check_json(value: object, place: str) -> None:
    """Refuse, with its dotted place, the first value that JSON cannot hold."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise refuse(
                    "DSF001", place or "deepspeed_config", f"the key {key!r} is not text", "use text"
                )
            _check_json(item, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_json(item, f"{place}[{number}]")
    elif not (value is None or isinstance(value, str | bool | int)) and not (
        isinstance(value, float) and math.isfinite(value)
    ):
        raise refuse("DSF001", place, f"{value!r} cannot be written as JSON", "use a plain finite value")
