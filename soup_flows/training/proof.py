"""Reads from the live ranks what really runs; see `soup_flows.proof` for what is compared."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from soup_flows.proof import Proof, RankProof, check
from soup_flows.sharding import ShardingPlan


def collect(trainer: Any, plan: ShardingPlan) -> Proof:
    """Gather every rank's row on every rank and compare them with `plan`; a collective call."""
    row = measure(trainer)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rows: list[Any] = [row.model_dump()]
    if world_size > 1:
        rows = [None] * world_size
        dist.all_gather_object(rows, row.model_dump())
    ranks = tuple(RankProof.model_validate(item) for item in rows)
    return Proof(world_size=world_size, ranks=ranks, failures=tuple(check(world_size, ranks, plan)))


def measure(trainer: Any) -> RankProof:
    """Count what this rank holds."""
    wrapped = trainer.model_wrapped
    model = getattr(wrapped, "module", wrapped)
    held: dict[str, int] = {}
    total = trainable = slack = 0
    for parameter in model.parameters():
        whole, local = _elements(parameter)
        total += whole
        # ZeRO pads each tensor to the world size; FSDP2 deals out whole rows of the first dimension
        shape = getattr(parameter, "ds_shape", parameter.shape)
        slack += trainer.args.world_size + (whole // shape[0] if shape else 1)
        trainable += whole if parameter.requires_grad else 0
        name = str(parameter.dtype).removeprefix("torch.")
        held[name] = held.get(name, 0) + local
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    moments = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
    return RankProof(
        rank=trainer.args.process_index,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=str(trainer.args.device),
        wrapper=_wrapper(wrapped),
        zero_stage=wrapped.zero_optimization_stage() if hasattr(wrapped, "zero_optimization_stage") else 0,
        optimizer=type(optimizer).__name__,
        parameters_total=total,
        parameters_held=sum(held.values()),
        trainable_total=trainable,
        optimizer_held=sum(_elements(moment)[1] for moment in moments),
        slack=slack,
        dtypes=held,
        step=trainer.state.global_step,
    )


def _wrapper(wrapped: Any) -> str:
    """Name what wraps the model; FSDP2 changes the class of the model itself."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(wrapped, FSDPModule):
        return "FSDPModule"
    name = type(wrapped).__name__
    return name if name in ("DeepSpeedEngine", "DistributedDataParallel") else "none"


def _elements(tensor: Any) -> tuple[int, int]:
    """Return (elements of the whole tensor, elements this rank holds)."""
    if hasattr(tensor, "ds_tensor"):
        return tensor.ds_numel, tensor.ds_tensor.numel()
    if hasattr(tensor, "to_local"):
        return tensor.numel(), tensor.to_local().numel()
    return tensor.numel(), tensor.numel()


def dtype_of(plan: ShardingPlan) -> torch.dtype:
    """Return the compute dtype of the plan."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[plan.dtype]
