"""Fit a DeepSpeed config to a run: its ranks, batch, dtype and machine. Every change is noted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from soup_flows.batch import batch_arithmetic, count_nodes, positive
from soup_flows.config_edit import ConfigEdit, raise_together
from soup_flows.errors import nearest, refuse

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
OFFLOAD_BLOCKS = ("offload_optimizer", "offload_param")

_QUANTISED = {
    "zero_quantized_weights": "the quantizer works in fp16 and clips other values to its range "
    "(deepspeedai/DeepSpeed#7775)",
    "zero_quantized_nontrainable_weights": "DeepSpeed asserts fp16 for it (deepspeedai/DeepSpeed#4885)",
    "zero_quantized_gradients": "its kernel reads the gradients as fp16 (deepspeedai/DeepSpeed#4886)",
}


def resolve_deepspeed_config(
    cfg: Mapping[str, Any],
    gpu_count: int,
    *,
    ranks_per_node: int | None = None,
    per_device_train_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    train_batch_size: int | None = None,
    dtype: str | None = None,
    gradient_clipping: float | None = None,
    nvme_path: str | None = None,
    has_compiler: bool | None = None,
    hidden_size: int | None = None,
    pin_memory: bool | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Fit a DeepSpeed config to the run.

    Where the global batch is a number, `train_batch_size = micro * accumulation * gpu_count` holds
    afterwards: the micro batch is kept if it divides the share of a rank, else lowered to the largest
    divisor; accumulation takes the rest. Batch values that are `"auto"` stay so unless batch numbers are
    given here.

    Args:
        cfg: the DeepSpeed JSON as a dict; it is not changed.
        gpu_count: ranks over all nodes (CPU ranks in a rehearsal).
        ranks_per_node: ranks on each node; all of them on one node when empty.
        per_device_train_batch_size: rows per rank and pass.
        gradient_accumulation_steps: passes per optimizer step; gives way to the two batch sizes.
        train_batch_size: rows per optimizer step over all ranks.
        dtype: `bf16`, `fp16` or `fp32`: turns the dtype blocks into literals; left `"auto"` when empty.
        gradient_clipping: norm to clip at, 0 for none.
        nvme_path: absolute folder on a local NVMe disk, for configs that off-load to NVMe.
        has_compiler: False if the machine has no C++ compiler (or no ninja): DeepSpeed's CPU Adam cannot be
            built then, and torch's AdamW is made to update the off-loaded states.
        hidden_size: the model's hidden size: turns the `"auto"` bucket sizes into numbers.
        pin_memory: page-lock off-loaded tensors or not (False for CPU ranks and tight memlock limits).

    Returns:
        The new dict, and one note per change: old -> new and why.

    Raises:
        Refused: a ValueError with every problem: a batch that cannot be split (with the nearest that can), a
            missing NVMe path, NVMe without a compiler, values of the wrong kind.
    """
    _check_shape(cfg)
    world = positive("gpus", gpu_count)
    asked = (train_batch_size, per_device_train_batch_size, gradient_accumulation_steps)
    edit = ConfigEdit(cfg)
    raise_together(
        lambda: _batch(edit, world, asked),
        lambda: _dtype(edit, dtype),
        lambda: _clipping(edit, gradient_clipping),
        lambda: _zeropp(edit, world, ranks_per_node),
        lambda: _nvme(edit, nvme_path),
        lambda: _offload(edit, has_compiler, pin_memory),
        lambda: _buckets(edit, hidden_size),
    )
    return edit.cfg, edit.notes


def _zero(edit: ConfigEdit) -> dict[str, Any]:
    """Return the `zero_optimization` block (checked to be one before anything else)."""
    block: dict[str, Any] = edit.cfg["zero_optimization"]
    return block


def _offload_blocks(edit: ConfigEdit) -> dict[str, dict[str, Any]]:
    """Return the off-load blocks that exist."""
    zero = _zero(edit)
    return {name: zero[name] for name in OFFLOAD_BLOCKS if isinstance(zero.get(name), dict)}


def _check_shape(cfg: object) -> None:
    """Refuse what is not a DeepSpeed config at all."""
    if not isinstance(cfg, Mapping):
        found = type(cfg).__name__
        raise refuse("DSR001", "deepspeed_config", f"got {found}", "give the DeepSpeed JSON as a dict")
    zero = cfg.get("zero_optimization")
    if not isinstance(zero, Mapping):
        message = f"got {zero!r}: DeepSpeed would shard nothing, or guess a stage"
        raise refuse("DSR001", "zero_optimization", message, 'write {"stage": 2} or another stage')


def _batch(edit: ConfigEdit, world: int, asked: tuple[int | None, int | None, int | None]) -> None:
    """Make the three batch keys agree with each other, with what was asked for, and with the ranks."""
    keys = (TOTAL, MICRO, ACCUMULATION)
    given = {key: value for key, value in zip(keys, asked, strict=True) if value is not None}
    now = {key: edit.cfg.get(key) for key in keys}
    numbers = {key: value for key, value in now.items() if value is not None and value != "auto"}
    for key, value in (*numbers.items(), *given.items()):
        positive(key, value)
    wanted = {**numbers, **given}
    total = _global_batch(now, given, wanted, world)
    if total is None:
        for key in now:
            why = "given for this run" if key in given else "without it the engine may count another batch"
            edit.set(key, wanted.get(key, "auto"), why)
        return
    share, wish = total // world, None
    for values in (numbers, given):  # what is given for this run beats what the config says
        if ACCUMULATION in values:
            wish = max(1, share // values[ACCUMULATION])
        wish = values.get(MICRO, wish)
    batch = batch_arithmetic(total, world, wish)
    micro, accumulation = batch.per_device_train_batch_size, batch.gradient_accumulation_steps
    divides = f"the {share} rows of each rank ({total} over {world})"
    lowered = f"{wish} does not divide {divides}; the largest divisor below it"
    reasons = {
        TOTAL: "rows per optimizer step of this run",
        MICRO: f"divides {divides}" if wish in (None, micro) else lowered,
        ACCUMULATION: f"keeps the global batch {total} = micro batch {micro} x {accumulation} x {world} GPUs",
    }
    for key, value in ((TOTAL, total), (MICRO, micro), (ACCUMULATION, accumulation)):
        if given or now[key] != "auto":
            edit.set(key, value, reasons[key])


def _global_batch(
    now: Mapping[str, Any], given: Mapping[str, int], wanted: Mapping[str, int], world: int
) -> int | None:
    """Return the rows per optimizer step, or None where only Trainer will know them."""
    if TOTAL in given:
        return given[TOTAL]
    product = wanted[MICRO] * wanted[ACCUMULATION] * world if {MICRO, ACCUMULATION} <= set(wanted) else None
    if {MICRO, ACCUMULATION} <= set(given) or (product and now[TOTAL] is None):
        return product
    return wanted.get(TOTAL, product if given else None)


def _dtype(edit: ConfigEdit, dtype: str | None) -> None:
    """Turn the dtype blocks into literals."""
    if dtype is None:
        return
    names = ("bf16", "fp16", "fp32")
    if dtype not in names:
        raise refuse("DSR002", "dtype", f"got {dtype!r}", f"use {', '.join(names)}; {nearest(dtype, names)}")
    for name in ("bf16", "fp16"):
        if name == dtype or name in edit.cfg:
            edit.set(f"{name}.enabled", name == dtype, f"the run computes in {dtype}")


def _clipping(edit: ConfigEdit, norm: float | None) -> None:
    """Write the norm to clip at."""
    if norm is None:
        return
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not 0 <= norm < float("inf"):
        raise refuse("DSR002", "gradient_clipping", f"got {norm!r}", "use a number >= 0; 0 turns it off")
    edit.set("gradient_clipping", norm, "the run's max_grad_norm")


def _zeropp(edit: ConfigEdit, world: int, ranks_per_node: int | None) -> None:
    """Derive the ZeRO++ keys from ranks per node, nodes and dtype; absent keys stay absent."""
    nodes, local = count_nodes(world, ranks_per_node)
    zero, path = _zero(edit), "zero_optimization."
    hpz = zero.get("zero_hpz_partition_size")
    if hpz is not None and nodes == 1:
        edit.drop(
            f"{path}zero_hpz_partition_size",
            "on one node a second copy of the weights saves no traffic and costs memory; "
            "without it this is plain zero3",
        )
    elif hpz is not None and (not isinstance(hpz, int) or hpz <= 1 or local % hpz):
        edit.set(f"{path}zero_hpz_partition_size", local, f"ranks per node, on {nodes} nodes")
    dtype = next((name for name in ("bf16", "fp16") if _enabled(edit.cfg, name)), "not fp16")
    for key, why in _QUANTISED.items():
        if zero.get(key) and dtype != "fp16":
            edit.set(path + key, False, f"the run's dtype is {dtype}, and {why}")
    if zero.get("zero_quantized_gradients") and nodes == 1:
        edit.set(f"{path}zero_quantized_gradients", False, "DeepSpeed uses it between nodes only")


def _enabled(cfg: Mapping[str, Any], name: str) -> bool:
    """Say whether the dtype block `name` is literally on."""
    block = cfg.get(name)
    return isinstance(block, Mapping) and block.get("enabled") is True


def with_nvme_path(cfg: Mapping[str, Any], nvme_path: str) -> dict[str, Any]:
    """Return `cfg` with the NVMe folder in every off-load block that has a place for it.

    Raises:
        Refused: if the path is not absolute.
    """
    edit = ConfigEdit(cfg)
    _nvme(edit, nvme_path)
    return edit.cfg


def _nvme(edit: ConfigEdit, nvme_path: str | None) -> None:
    """Write the NVMe folder where there is a place for it, and check that none is missing."""
    blocks = {
        name: b for name, b in _offload_blocks(edit).items() if "nvme_path" in b or b.get("device") == "nvme"
    }
    if nvme_path is not None:
        if not isinstance(nvme_path, str | os.PathLike) or not os.path.isabs(nvme_path):
            raise refuse(
                "DSR004", "nvme_path", f"got {nvme_path!r}", "give an absolute folder on a local NVMe disk"
            )
        for name, block in blocks.items():
            used = "" if block.get("device") == "nvme" else ", used once its device is nvme"
            edit.set(f"zero_optimization.{name}.nvme_path", os.fspath(nvme_path), f"the run's folder{used}")
    check_nvme_path(edit.cfg)


def check_nvme_path(cfg: Mapping[str, Any]) -> None:
    """Refuse a config that off-loads to NVMe and has no absolute path for it.

    Raises:
        Refused: naming the blocks. DeepSpeed itself asserts only after the model was loaded.
    """
    zero = cfg.get("zero_optimization")
    blocks = zero if isinstance(zero, Mapping) else {}
    lost = [
        name
        for name in OFFLOAD_BLOCKS
        if isinstance(block := blocks.get(name), Mapping)
        and block.get("device") == "nvme"
        and not os.path.isabs(str(block.get("nvme_path") or ""))
    ]
    if lost:
        raise refuse(
            "DSR004",
            "nvme_path",
            f"{' and '.join(lost)} off-load to NVMe, and no absolute folder is given",
            "set nvme_path to a folder on a local NVMe disk",
            "DeepSpeed 0.19.8 runtime/zero/partition_parameters.py",
        )


def _offload(edit: ConfigEdit, has_compiler: bool | None, pin_memory: bool | None) -> None:
    """Fit off-loading to the machine: page-locked memory and the ops that DeepSpeed compiles on first use."""
    devices = {name: block.get("device", "none") for name, block in _offload_blocks(edit).items()}
    for name, device in devices.items():
        if pin_memory is not None and device != "none":
            why = "asked for this run" if pin_memory else "CPU ranks, or a low limit of locked memory"
            edit.set(f"zero_optimization.{name}.pin_memory", pin_memory, why)
    if has_compiler is not False:
        return
    if "nvme" in devices.values():
        raise refuse(
            "DSR005",
            "deepspeed",
            "off-loading to NVMe compiles DeepSpeed's async_io op; this machine has no C++ compiler or ninja",
            "install g++, ninja and libaio-dev, or use zero3_offload",
            "deepspeedai/DeepSpeed#2503",
        )
    if devices.get("offload_optimizer", "none") != "none":
        edit.set(
            "zero_force_ds_cpu_optimizer",
            False,
            "no C++ compiler or ninja to build DeepSpeed's CPU Adam: torch's AdamW updates the off-loaded "
            "states, which is slower",
        )


def _buckets(edit: ConfigEdit, hidden_size: int | None) -> None:
    """Turn the `"auto"` bucket sizes into the numbers transformers 5.24 would fill in."""
    if hidden_size is None:
        return
    h = positive("hidden_size", hidden_size)
    sizes = {
        "reduce_bucket_size": h * h,
        "stage3_prefetch_bucket_size": int(0.9 * h * h),
        "stage3_param_persistence_threshold": 10 * h,
    }
    for key, size in sizes.items():
        if _zero(edit).get(key) == "auto":
            edit.set(f"zero_optimization.{key}", size, f"from the model's hidden size {h}")
