"""Rules about DeepSpeed on this machine: NVMe, compiled operators, host memory, the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soup_flows.config_edit import ConfigEdit
from soup_flows.hardware.host import disk
from soup_flows.sharding import ShardingPlan
from soup_flows.validation.table import DEEPSPEED, TRANSFORMERS, Context, Found, rule, rules_in

GIB = 1 << 30
OPTIMIZER_BYTES = 12
"""Bytes of off-loaded optimizer state per trained parameter: fp32 weight and Adam's two states."""
PARAM_BYTES = 2
"""Bytes of an off-loaded parameter in bf16 or fp16."""
DEFAULT_BUFFER = 100_000_000
NOT_A_DISK = ("tmpfs", "ramfs", "nfs", "nfs4", "lustre", "gpfs", "fuse", "cifs", "smb3", "ceph", "9p", "overlay")
AIO_FILES = ("include/libaio.h",)
AUTO_BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def _nvme(run: Context) -> dict[str, str]:
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
    blocks, full = _nvme(run), run.full
    return (OPTIMIZER_BYTES * count if "offload_optimizer" in blocks and full else 0) + (
        PARAM_BYTES * count if "offload_param" in blocks else 0
    )


def _parent(folder: str) -> Path:
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


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
    for folder in sorted(set(_nvme(run).values())):
        parent = _parent(folder)
        if os.path.isabs(folder) and not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
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
    for folder in sorted(set(_nvme(run).values())):
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
    for folder in sorted(set(_nvme(run).values())):
        found = disk(folder, Path("/")) if os.path.isabs(folder) else None
        if found and need and need > found.free_bytes:
            yield Found(f"{need / GIB:.1f} GiB go to {folder}, which has {found.free_bytes / GIB:.1f} GiB free")


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
    if not _nvme(run):
        return
    roots = ["/usr", "/usr/local", run.environ.get("CONDA_PREFIX", "/usr")]
    flags = run.environ.get("CFLAGS", "").split()
    roots += [flag[2:].removesuffix("/include") for flag in flags if flag.startswith("-I")]
    if not any((Path(root) / name).is_file() for root in roots for name in AIO_FILES):
        yield Found("libaio.h was not found")


def _largest_parameter(run: Context) -> int | None:
    """Return the elements of the largest weight: the embedding, a projection, or fused experts."""
    model = run.model
    hidden, vocab = model.hidden_size, model.number("vocab_size")
    if not hidden or not vocab:
        return None
    inner = model.number("moe_intermediate_size", "intermediate_size") or 4 * hidden
    experts = model.number("num_experts", "num_local_experts", "n_routed_experts") or 0
    return max(vocab * hidden, inner * hidden, 2 * experts * inner * hidden)


def _buffer_needed(run: Context) -> int | None:
    largest = _largest_parameter(run)
    return None if largest is None else -(-largest // run.plan.world_size)


def _mend_buffer(run: Context) -> tuple[ShardingPlan, str]:
    need = _buffer_needed(run) or DEFAULT_BUFFER
    size = -(-need // 10_000_000) * 10_000_000
    return _edited(run, "zero_optimization.offload_param.buffer_size", size, "the largest weight of a rank fits")


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
    if "offload_param" in _nvme(run) and need is not None:
        size = run.zero["offload_param"].get("buffer_size", DEFAULT_BUFFER)
        if isinstance(size, int | float) and need > size:
            yield Found(f"buffer_size is {size:g} and a rank's part of the largest weight has {need:g} elements")


def _mend_buckets(run: Context) -> tuple[ShardingPlan, str]:
    defaults = {AUTO_BUCKETS[0]: 500_000_000, AUTO_BUCKETS[1]: 50_000_000, AUTO_BUCKETS[2]: 100_000}
    edit = ConfigEdit(run.plan.config)
    for key, size in defaults.items():
        if run.zero.get(key) == "auto":
            edit.set(f"zero_optimization.{key}", size, "DeepSpeed's default; the model has no hidden_size")
    notes = (*run.plan.notes, *edit.notes)
    return run.plan.model_copy(update={"config": edit.cfg, "notes": notes}), "; ".join(edit.notes)


@rule(
    "DS007",
    "error",
    "deepspeed_config.zero_optimization.reduce_bucket_size",
    "transformers fills it from the model's hidden_size and stops",
    fix="write numbers: reduce_bucket_size 5e8, stage3_prefetch_bucket_size 5e7, "
    "stage3_param_persistence_threshold 1e5",
    source="transformers/integrations/deepspeed.py, trainer_config_finalize",
    versions=TRANSFORMERS,
    auto_fix=_mend_buckets,
)
def no_hidden_size(run: Context) -> Iterator[Found]:
    """`"auto"` bucket sizes for a model whose config has no hidden size."""
    keys = [key for key in AUTO_BUCKETS if run.zero.get(key) == "auto"]
    if keys and run.model.config is not None and run.model.hidden_size is None:
        if not run.model.text_config.get("hidden_sizes"):
            yield Found(f'{", ".join(keys)} "auto", and config.json has no hidden_size')


def _mend_pinning(run: Context) -> tuple[ShardingPlan, str]:
    edit = ConfigEdit(run.plan.config)
    for block in _nvme(run):
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
    for name in _nvme(run):
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


def _cuda_operators(run: Context) -> list[str]:
    """Name what DeepSpeed compiles with nvcc in this run."""
    optimizer = run.plan.config.get("optimizer") if run.plan.engine == "deepspeed" else None
    named = str(optimizer.get("type", "")).lower() if isinstance(optimizer, dict) else ""
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    torch_adam = isinstance(params, dict) and params.get("torch_adam") is True
    found = []
    if named in ("adam", "adamw", "lion", "lamb") and not torch_adam:
        if run.device_of("offload_optimizer") == "none" or named == "lamb":
            found.append(f"DeepSpeed's fused {named}")
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if run.zero.get(key) is True and run.stage == 3:
            found.append(f"the quantizer of {key}")
    return found


@rule(
    "DS009",
    "error",
    "deepspeed_config.optimizer",
    "it is compiled at the first use, and the ranks stop after loading the model",
    fix='install the CUDA toolkit and set CUDA_HOME, or leave the optimizer out ("torch_adam": true also does)',
    source="deepspeed/ops/op_builder/builder.py, installed_cuda_version",
    versions=DEEPSPEED,
)
def no_nvcc(run: Context) -> Iterator[Found]:
    """A CUDA operator of DeepSpeed on a machine without nvcc."""
    if run.plan.device == "cuda" and run.hardware.cuda_toolkit is None:
        for name in _cuda_operators(run):
            yield Found(f"{name} needs nvcc, and there is none")


@rule(
    "DS010",
    "error",
    "deepspeed_config.optimizer",
    "DeepSpeed refuses to compile it (CUDAMismatchException)",
    fix="point CUDA_HOME at a toolkit of torch's CUDA version; DS_SKIP_CUDA_CHECK=1 for a minor difference",
    source="deepspeed/ops/op_builder/builder.py, assert_no_cuda_mismatch",
    versions=DEEPSPEED,
)
def other_nvcc(run: Context) -> Iterator[Found]:
    """A CUDA operator of DeepSpeed with an nvcc of another version than torch's."""
    nvcc, torch = run.hardware.cuda_toolkit, run.hardware.torch_cuda
    if run.plan.device != "cuda" or not nvcc or torch in (None, "none") or run.environ.get("DS_SKIP_CUDA_CHECK") == "1":
        return
    mine, wanted = nvcc.split(".")[:2], str(torch).split(".")[:2]
    # Minor versions are let through up to CUDA 12 (cuda_minor_mismatch_ok in the same file).
    if mine[0] != wanted[0] or (int(mine[0]) > 12 and mine != wanted):
        for name in _cuda_operators(run):
            yield Found(f"{name} is compiled by nvcc {nvcc} for a torch of CUDA {torch}")


@rule(
    "DS011",
    "error",
    "deepspeed",
    "the kernel kills a rank without a traceback (exit code -9)",
    fix="use a machine with more memory, more GPUs without off-load, or zero3_nvme",
    source="deepspeedai/DeepSpeed#3481: 12 bytes a parameter for the optimizer, 2 for the weights",
    versions=DEEPSPEED,
)
def host_memory(run: Context) -> Iterator[Found]:
    """CPU off-load of more than the host's memory holds."""
    count = run.model.parameters
    if count is None or run.plan.engine != "deepspeed":
        return
    need = OPTIMIZER_BYTES * count if run.full and run.device_of("offload_optimizer") == "cpu" else 0
    need += PARAM_BYTES * count if run.stage == 3 and run.device_of("offload_param") == "cpu" else 0
    need = need // run.plan.nodes
    if need > run.hardware.host_memory.usable_bytes:
        usable = run.hardware.host_memory.usable_bytes
        yield Found(f"{need / GIB:.1f} GiB are off-loaded and {usable / GIB:.1f} GiB of memory can be used")


@rule(
    "DS012",
    "note",
    "deepspeed",
    "gathering frozen weights at every layer is slower than keeping them",
    fix="use zero2 or strategy=ddp",
    source="PEFT documentation, DeepSpeed guide",
)
def zero3_for_small_lora(run: Context) -> Iterator[Found]:
    """ZeRO-3 for adapters on a model that fits one GPU twice."""
    count = run.model.parameters
    if run.stage == 3 and not run.full and count and run.plan.device == "cuda" and run.plan.world_size > 1:
        smallest = min(gpu.memory_total_bytes for gpu in run.hardware.gpus)
        if 2 * count * PARAM_BYTES < smallest and run.device_of("offload_param") == "none":
            yield Found(f"the weights take {count * PARAM_BYTES / GIB:.1f} of {smallest / GIB:.0f} GiB")


@rule(
    "DS013",
    "warning",
    "deepspeed_config.zero_optimization.leaf_module",
    "ranks that route to different experts wait for each other for ever",
    fix='name the expert block: "leaf_module": {"classes": ["<its class>"]}',
    source="deepspeedai/DeepSpeed#4966, #5008, #7461",
    versions=DEEPSPEED,
)
def remote_experts(run: Context) -> Iterator[Found]:
    """Experts from the model's own code under ZeRO-3, without a leaf module."""
    code = run.spec.trust_remote_code and bool((run.model.config or {}).get("auto_map"))
    if run.stage == 3 and run.model.is_moe and code and not run.zero.get("leaf_module"):
        yield Found("a mixture of experts with its own code under ZeRO-3")


@rule(
    "DS014",
    "warning",
    "nvme_path",
    "nothing is off-loaded to NVMe, so it is not used",
    fix="use deepspeed=zero3_nvme, or drop nvme_path",
    source="this package: presets",
)
def unused_nvme_path(run: Context) -> Iterator[Found]:
    """`nvme_path` without a strategy that off-loads to NVMe."""
    if run.spec.nvme_path is not None and not _nvme(run):
        yield Found(f"nvme_path={run.spec.nvme_path} with {run.plan.strategy}")


@rule(
    "DS015",
    "error",
    "gpus",
    "DeepSpeed takes the topology from all visible GPUs and groups the wrong ranks",
    fix="use every GPU of the node, or set CUDA_VISIBLE_DEVICES to those in use",
    source="deepspeed/runtime/zero/stage3.py: device_count()",
    versions=DEEPSPEED,
)
def partly_used_nodes(run: Context) -> Iterator[Found]:
    """Quantised gradients between nodes that are only partly used."""
    if run.zero.get("zero_quantized_gradients") is True and run.plan.nodes > 1:
        if run.plan.ranks_per_node != len(run.hardware.gpus):
            yield Found(f"{run.plan.ranks_per_node} of {len(run.hardware.gpus)} GPUs per node")


RULES = rules_in(globals())
