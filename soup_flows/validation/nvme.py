"""Rules about off-loading to NVMe (ZeRO-Infinity): the folder, the operator, the buffers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from soup_flows.config_edit import ConfigEdit
from soup_flows.hardware.host import disk
from soup_flows.paths import is_writable_folder, nearest_existing
from soup_flows.sharding import ShardingPlan
from soup_flows.validation.table import DEEPSPEED, Context, Found, rule, rules_in

GIB = 1 << 30
OPTIMIZER_BYTES = 12
"""Bytes of off-loaded optimizer state per trained parameter: fp32 weight and Adam's two states."""
PARAM_BYTES = 2
"""Bytes of an off-loaded parameter in bf16 or fp16."""
DEFAULT_BUFFER = 100_000_000
NOT_A_DISK = (
    "tmpfs",
    "ramfs",
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "fuse",
    "cifs",
    "smb3",
    "ceph",
    "9p",
)
AIO_FILES = ("include/libaio.h",)


def nvme_blocks(run: Context) -> dict[str, str]:
    """Return off-load block -> folder, for the blocks that go to NVMe."""
    blocks = {name: run.zero.get(name) for name in ("offload_optimizer", "offload_param")}
    return {
        name: str(block.get("nvme_path") or "")
        for name, block in blocks.items()
        if isinstance(block, dict) and block.get("device") == "nvme"
    }


def _nvme_bytes(run: Context) -> int | None:
    """Return what the off-load writes to NVMe on one node, in bytes."""
    count = run.model.parameters
    if count is None:
        return None
    blocks, full = nvme_blocks(run), run.full
    return (OPTIMIZER_BYTES * count if "offload_optimizer" in blocks and full else 0) + (
        PARAM_BYTES * count if "offload_param" in blocks else 0
    )


@rule(
    "DS001",
    "error",
    "nvme_path",
    "the ranks would stop when they swap for the first time",
    fix="name a folder on a local NVMe disk that you may write",
    source="huggingface/transformers#16616",
    versions=DEEPSPEED,
    local=True,
)
def nvme_not_writable(run: Context) -> Iterator[Found]:
    """An NVMe folder that cannot be written."""
    for folder in sorted(set(nvme_blocks(run).values())):
        parent = nearest_existing(Path(folder))
        if os.path.isabs(folder) and not is_writable_folder(parent):
            yield Found(f"{parent} is not a folder that this user may write")


@rule(
    "DS002",
    "error",
    "nvme_path",
    "swapping there takes main memory or the network, and is slower than no off-load at all",
    fix="name a folder on a local NVMe disk",
    source="DeepSpeed ZeRO-Infinity documentation: nvme_path is a local device",
    versions=DEEPSPEED,
    local=True,
)
def nvme_is_no_disk(run: Context) -> Iterator[Found]:
    """An NVMe folder in main memory or on a network file system."""
    for folder in sorted(set(nvme_blocks(run).values())):
        found = disk(folder, Path("/")) if os.path.isabs(folder) else None
        if found and found.filesystem.split(".")[0] in NOT_A_DISK:
            yield Found(f"{folder} is on {found.filesystem}")


@rule(
    "DS003",
    "error",
    "nvme_path",
    "the disk is full in the middle of the run",
    fix="free space, use another disk, or zero3_offload",
    source="huggingface/transformers#16616: 12 bytes a parameter for the optimizer, 2 for the weights",
    versions=DEEPSPEED,
    local=True,
)
def nvme_too_small(run: Context) -> Iterator[Found]:
    """An NVMe disk that does not hold what is off-loaded."""
    need = _nvme_bytes(run)
    for folder in sorted(set(nvme_blocks(run).values())):
        found = disk(folder, Path("/")) if os.path.isabs(folder) else None
        if found and need and need > found.free_bytes:
            yield Found(
                f"{need / GIB:.1f} GiB go to {folder}, which has {found.free_bytes / GIB:.1f} GiB free"
            )


@rule(
    "DS004",
    "error",
    "deepspeed",
    "DeepSpeed's async_io operator does not build, and the ranks stop after loading the model",
    fix="install libaio-dev (conda: libaio), or use zero3_offload",
    source="deepspeed/ops/op_builder/async_io.py; deepspeedai/DeepSpeed#2503",
    versions=DEEPSPEED,
    local=True,
)
def no_libaio(run: Context) -> Iterator[Found]:
    """Off-load to NVMe without the headers of libaio."""
    if not nvme_blocks(run):
        return
    roots = ["/usr", "/usr/local", run.environ.get("CONDA_PREFIX", "/usr")]
    flags = run.environ.get("CFLAGS", "").split()
    roots += [flag[2:].removesuffix("/include") for flag in flags if flag.startswith("-I")]
    if not any((Path(root) / name).is_file() for root in roots for name in AIO_FILES):
        yield Found("libaio.h was not found")


def _largest_parameter(run: Context) -> int | None:
    """Return the elements of the largest weight: one of the files, or the experts that are fused on loading."""
    model = run.model
    stored = max((prod(shape) for shape in model.shapes.values()), default=0)
    hidden, vocab = model.hidden_size, model.number("vocab_size")
    if not hidden or not vocab:
        return stored or None
    inner = model.number("moe_intermediate_size", "intermediate_size") or 4 * hidden
    experts = model.number("num_experts", "num_local_experts", "n_routed_experts") or 0
    return max(stored, vocab * hidden, inner * hidden, 2 * experts * inner * hidden)


def _buffer_needed(run: Context) -> int | None:
    largest = _largest_parameter(run)
    return None if largest is None else -(-largest // run.plan.world_size)


def _mend_buffer(run: Context) -> tuple[ShardingPlan, str]:
    need = _buffer_needed(run) or DEFAULT_BUFFER
    size = -(-need // 10_000_000) * 10_000_000
    return _edited(
        run, "zero_optimization.offload_param.buffer_size", size, "the largest weight of a rank fits"
    )


def _edited(run: Context, path: str, value: Any, why: str) -> tuple[ShardingPlan, str]:
    """Change one value of the plan's config and note it."""
    edit = ConfigEdit(run.plan.config)
    edit.set(path, value, why)
    notes = (*run.plan.notes, *edit.notes)
    return run.plan.model_copy(update={"config": edit.cfg, "notes": notes}), edit.notes[0]


@rule(
    "DS005",
    "error",
    "deepspeed_config.zero_optimization.offload_param.buffer_size",
    "DeepSpeed asserts on it in the first forward pass",
    fix="raise buffer_size (elements, not bytes)",
    source="deepspeed/runtime/swap_tensor/partitioned_param_swapper.py; deepspeedai/DeepSpeed#3506",
    versions=DEEPSPEED,
    auto_fix=_mend_buffer,
)
def small_buffer(run: Context) -> Iterator[Found]:
    """An NVMe buffer that does not hold a rank's part of the largest weight."""
    need = _buffer_needed(run)
    if "offload_param" in nvme_blocks(run) and need is not None:
        size = run.zero["offload_param"].get("buffer_size", DEFAULT_BUFFER)
        if isinstance(size, int | float) and need > size:
            yield Found(
                f"buffer_size is {size:g} and a rank's part of the largest weight has {need:g} elements"
            )


def _mend_pinning(run: Context) -> tuple[ShardingPlan, str]:
    edit = ConfigEdit(run.plan.config)
    for block in nvme_blocks(run):
        edit.set(f"zero_optimization.{block}.pin_memory", False, "the limit of locked memory is low")
    notes = (*run.plan.notes, *edit.notes)
    return run.plan.model_copy(update={"config": edit.cfg, "notes": notes}), "; ".join(edit.notes)


@rule(
    "DS008",
    "warning",
    "deepspeed_config.zero_optimization.offload_param.pin_memory",
    "locking the swap buffers fails or kills the ranks",
    fix="raise the limit (ulimit -l unlimited; docker run --ulimit memlock=-1), or pin_memory: false",
    source="deepspeedai/DeepSpeed#3000, #3481",
    versions=DEEPSPEED,
    auto_fix=_mend_pinning,
)
def small_memlock(run: Context) -> Iterator[Found]:
    """Page-locked NVMe buffers beyond the limit of locked memory."""
    limit = run.hardware.memlock
    for name in nvme_blocks(run):
        block = run.zero[name]
        count, size = block.get("buffer_count", 4), block.get("buffer_size", DEFAULT_BUFFER)
        numbers = isinstance(count, int | float) and isinstance(size, int | float)
        if block.get("pin_memory") and isinstance(limit, int) and numbers:
            need = int(count * size * PARAM_BYTES)
            if need > limit:
                yield Found(
                    f"{name} locks {need / GIB:.1f} GiB and {limit / GIB:.3f} GiB are allowed",
                    f"deepspeed_config.zero_optimization.{name}.pin_memory",
                )


RULES = rules_in(globals())
