"""Rules about the machine under this plan; what is wrong with the machine as such is `hardware.doctor`'s."""

from __future__ import annotations

from collections.abc import Iterator

from soup_flows.validation.table import ACCELERATE, TRANSFORMERS, Context, Found, rule, rules_in

GIB = 1 << 30
TOKENISED = 11
"""Bytes of main memory per byte of text once it is tokenised: about 4 bytes of text per token, a Python integer
(28 bytes) and a pointer in each of two lists (16 bytes)."""


@rule(
    "HW041",
    "error",
    "gpus",
    "NCCL cannot connect slices of one GPU, and each process sees the first slice only",
    fix="use gpus=1 and one run per slice, or switch MIG off",
    source="pytorch/pytorch#130181, NVIDIA/nccl#1716",
)
def mig_ranks(run: Context) -> Iterator[Found]:
    """Several ranks on MIG slices."""
    used = run.hardware.gpus[: run.plan.ranks_per_node]
    if run.plan.device == "cuda" and run.plan.world_size > 1 and any(gpu.mig for gpu in used):
        yield Found(f"{run.plan.world_size} ranks on MIG slices")


def _loaded_bytes(run: Context) -> int | None:
    """Return what the ranks of a node read together while loading; None under ZeRO-3, or where unknown."""
    count = run.model.parameters
    if count is None or run.stage == 3:
        return None
    return count * (4 if _load_dtype(run) == "float32" else 2) * _readers(run)


def _readers(run: Context) -> int:
    """Return how many ranks of a node read the weights: under FSDP rank 0, except of 4-bit weights."""
    one = run.plan.engine == "fsdp" and run.spec.training.method != "qlora"
    return 1 if one else run.plan.ranks_per_node


def _load_dtype(run: Context) -> str:
    """Name the dtype the weights are loaded in: fp32 for full fine-tuning without DeepSpeed's own copies."""
    if run.full and run.plan.engine != "deepspeed":
        return "float32"
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[run.plan.dtype]


def _too_much(run: Context, converted: bool) -> Iterator[Found]:
    need, usable = _loaded_bytes(run), run.hardware.host_memory.usable_bytes
    if need is not None and need > usable and (_load_dtype(run) != run.model.dtype) is converted:
        ranks = _readers(run)
        yield Found(
            f"{ranks} rank(s) load {need / ranks / GIB:.1f} GiB each and {usable / GIB:.1f} GiB of memory can be used"
        )


@rule(
    "HW042",
    "error",
    "gpus",
    "the kernel kills a rank while the model is loaded, without a traceback (exit code -9)",
    fix="use deepspeed=zero3 or fsdp=full_shard (rank 0 alone reads the weights), fewer ranks, or a machine "
    "with more memory",
    source="soup_flows/training/model.py: DDP and ZeRO 1 and 2 load a whole copy on every rank",
    versions=f"{TRANSFORMERS}, {ACCELERATE}",
)
def loading(run: Context) -> Iterator[Found]:
    """Weights that are converted while they are loaded, times ranks, beyond the host's memory."""
    yield from _too_much(run, converted=True)


@rule(
    "HW044",
    "warning",
    "gpus",
    "loading is slow, and a rank may be killed, if the file cache cannot hold the weights",
    fix="use deepspeed=zero3 or fsdp=full_shard (rank 0 alone reads the weights), fewer ranks, or a machine "
    "with more memory",
    source="soup_flows/training/model.py: DDP and ZeRO 1 and 2 map a copy on every rank; equal dtypes stay mapped",
    versions=f"{TRANSFORMERS}, {ACCELERATE}",
)
def mapping(run: Context) -> Iterator[Found]:
    """Weights that are mapped as they are, times ranks, beyond the host's memory."""
    yield from _too_much(run, converted=False)


@rule(
    "HW043",
    "warning",
    "dataset",
    "TRL keeps all answers as text and tokens on every rank, and the kernel may kill one",
    fix="use fewer rows or ranks, or a machine with more memory",
    source="this package: about 11 bytes of memory per byte of text and rank",
)
def rows_in_memory(run: Context) -> Iterator[Found]:
    """Answers to compare that may not fit the host's memory; other rows are mapped from disk, once for all ranks."""
    if not run.spec.compares_answers:
        return
    need = run.data.bytes * TOKENISED * run.plan.ranks_per_node
    usable = run.hardware.host_memory.usable_bytes
    if need > usable:
        yield Found(f"about {need / GIB:.1f} GiB of tokens and {usable / GIB:.1f} GiB of memory")


RULES = rules_in(globals())
