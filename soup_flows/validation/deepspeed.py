"""Rules about DeepSpeed on this machine: compiled operators, host memory, the model."""

from __future__ import annotations

from collections.abc import Iterator

from soup_flows.config_edit import ConfigEdit
from soup_flows.sharding import ShardingPlan
from soup_flows.validation.nvme import GIB, OPTIMIZER_BYTES, PARAM_BYTES, nvme_blocks
from soup_flows.validation.table import DEEPSPEED, TRANSFORMERS, Context, Found, rule, rules_in

AUTO_BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


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
    if (
        keys
        and run.model.config is not None
        and run.model.hidden_size is None
        and not run.model.text_config.get("hidden_sizes")
    ):
        yield Found(f'{", ".join(keys)} "auto", and config.json has no hidden_size')


def _cuda_operators(run: Context) -> list[str]:
    """Name what DeepSpeed compiles with nvcc in this run."""
    optimizer = run.plan.config.get("optimizer") if run.plan.engine == "deepspeed" else None
    named = str(optimizer.get("type", "")).lower() if isinstance(optimizer, dict) else ""
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    torch_adam = isinstance(params, dict) and params.get("torch_adam") is True
    found = []
    if (
        named in ("adam", "adamw", "lion", "lamb")
        and not torch_adam
        and (run.device_of("offload_optimizer") == "none" or named == "lamb")
    ):
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
    if (
        run.plan.device != "cuda"
        or not nvcc
        or torch in (None, "none")
        or run.environ.get("DS_SKIP_CUDA_CHECK") == "1"
    ):
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
    if run.spec.nvme_path is not None and not nvme_blocks(run):
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
    if (
        run.zero.get("zero_quantized_gradients") is True
        and run.plan.nodes > 1
        and run.plan.ranks_per_node != len(run.hardware.gpus)
    ):
        yield Found(f"{run.plan.ranks_per_node} of {len(run.hardware.gpus)} GPUs per node")


RULES = rules_in(globals())
