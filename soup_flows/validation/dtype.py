"""Rules about precision."""

from __future__ import annotations

from collections.abc import Iterator

from soup_flows.validation.table import ACCELERATE, DEEPSPEED, TRANSFORMERS, Context, Found, rule, rules_in


@rule(
    "DT003",
    "warning",
    "training.dtype",
    "values beyond the range of fp16 overflow: the loss scale collapses or the loss becomes NaN",
    fix="use a GPU of compute capability 8.0 or newer, or dtype=fp32",
    source="transformers documentation, DeepSpeed: fp16 of models pre-trained in bf16",
)
def fp16_of_bf16_model(run: Context) -> Iterator[Found]:
    """fp16 for a model whose weights are in bf16."""
    if run.plan.dtype == "fp16" and run.model.dtype == "bfloat16":
        yield Found(f"{run.model.name} was trained in bf16 and this run computes in fp16")


@rule(
    "DT004",
    "warning",
    "training.dtype",
    "training takes several times as long and twice the activation memory",
    fix="use dtype=auto",
    source="NVIDIA A100 data sheet: 312 TFLOPS in bf16, 19.5 in fp32",
)
def fp32_on_new_gpu(run: Context) -> Iterator[Found]:
    """fp32 on GPUs that have bf16."""
    if run.plan.device == "cuda" and run.plan.dtype == "fp32" and all(gpu.bf16 for gpu in run.hardware.gpus):
        yield Found(f"fp32 on {run.hardware.gpus[0].name}")


@rule(
    "DT005",
    "warning",
    "training.dtype",
    "transformers refuses bf16 on GPUs below compute capability 8.0",
    fix="set dtype=fp16 if these GPUs are older than Ampere",
    source="transformers/training_args.py, bf16 checks",
    versions=TRANSFORMERS,
)
def unknown_capability(run: Context) -> Iterator[Found]:
    """bf16 on a GPU whose compute capability could not be read."""
    names = sorted({gpu.name for gpu in run.hardware.gpus if gpu.bf16 is None})
    if run.plan.device == "cuda" and run.plan.dtype == "bf16" and names:
        yield Found(f"the compute capability of {', '.join(names)} is not known")


@rule(
    "DT006",
    "note",
    "fsdp",
    "gradients are summed over the ranks in bf16, and logged losses are rounded to bf16",
    fix="nothing to do; compare runs by their evaluation loss",
    source="accelerate/utils/dataclasses.py, set_mixed_precision; pytorch/torchtune#2267",
    versions=ACCELERATE,
)
def bf16_reduce(run: Context) -> Iterator[Found]:
    """FSDP2 in bf16."""
    if run.plan.engine == "fsdp" and run.plan.dtype == "bf16" and run.plan.world_size > 1:
        yield Found("FSDP2 in bf16")


@rule(
    "DT007",
    "note",
    "training.method",
    "adapters are cast to the compute dtype, with fp32 copies in the optimizer; DDP and FSDP keep them in fp32",
    fix="nothing to do; expect differences of about 1e-3 between strategies",
    source="deepspeed/runtime/engine.py, _configure_distributed_model",
    versions=DEEPSPEED,
)
def cast_adapters(run: Context) -> Iterator[Found]:
    """Adapters under ZeRO in bf16 or fp16."""
    if run.plan.engine == "deepspeed" and not run.full and run.plan.dtype != "fp32":
        yield Found(f"LoRA under {run.plan.strategy} in {run.plan.dtype}")


@rule(
    "DT008",
    "error",
    "training.optimizer",
    "the parameters live in CPU memory there, and the fused kernel of the GPU cannot update them",
    fix="use optimizer=auto or adamw_torch",
    source="torch/distributed/fsdp, CPUOffloadPolicy",
    versions=ACCELERATE,
)
def fused_on_cpu(run: Context) -> Iterator[Found]:
    """The fused optimizer with FSDP's CPU off-load."""
    off = run.plan.engine == "fsdp" and run.plan.config.get("cpu_offload") is True
    if off and run.plan.optimizer == "adamw_torch_fused":
        yield Found("optimizer=adamw_torch_fused with full_offload")


RULES = rules_in(globals())
