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


@rule(
    "HW042",
    "error",
    "gpus",
    "the kernel kills a rank while the model is loaded, without a traceback (exit code -9)",
    fix="use deepspeed=zero3 (rank 0 alone reads the weights), fewer ranks, or a machine with more memory",
    source="huggingface/transformers#43749: every rank loads every weight, efficient loading or not",
    versions=f"{TRANSFORMERS}, {ACCELERATE}",
)
def loading(run: Context) -> Iterator[Found]:
    """Weights times ranks beyond the host's memory, while loading without ZeRO-3."""
    count = run.model.parameters
    if count is None or run.stage == 3:
        return
    each = 4 if run.plan.dtype == "fp32" or (run.full and run.plan.engine != "deepspeed") else 2
    need, usable = count * each * run.plan.ranks_per_node, run.hardware.host_memory.usable_bytes
    if need > usable:
        yield Found(
            f"{run.plan.ranks_per_node} rank(s) load {count * each / GIB:.1f} GiB each and "
            f"{usable / GIB:.1f} GiB of memory can be used"
        )


@rule(
    "HW043",
    "warning",
    "dataset",
    "every rank keeps all rows as tokens, and the kernel may kill one",
    fix="use fewer rows or ranks, or a machine with more memory",
    source="this package: about 11 bytes of memory per byte of text and rank",
)
def rows_in_memory(run: Context) -> Iterator[Found]:
    """Data that may not fit the host's memory once it is tokenised on every rank."""
    need = run.data.bytes * TOKENISED * run.plan.ranks_per_node
    usable = run.hardware.host_memory.usable_bytes
    if need > usable:
        yield Found(f"about {need / GIB:.1f} GiB of tokens and {usable / GIB:.1f} GiB of memory")


RULES = rules_in(globals())
