"""What DeepSpeed and FSDP need on CPU ranks (gloo): the demo, rehearsals and tests run so."""

from __future__ import annotations

from typing import Any


def prepare_deepspeed() -> None:
    """Start gloo for DeepSpeed on CPU, before the model exists.

    ZeRO-3 partitions while the model is built and needs the process group by then
    (microsoft/DeepSpeed#3341). The shared-memory all-reduce is an optional op that takes minutes to compile
    and only serves inference-sized tensors; gloo does its work, so it is left unbuilt.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def force_fsdp(arguments: Any) -> None:
    """Make accelerate honour FSDP on CPU.

    accelerate turns FSDP on for accelerators only: for its MULTI_CPU type it ignores the plugin and wraps the
    model in DDP without a word (accelerate 1.15, `accelerate/state.py`, the `MULTI_GPU` branch of
    `AcceleratorState`). The type is settled when `TrainingArguments.device` is first read; changed after that,
    FSDP2 shards for real over gloo. The proof at step 1 checks that it did.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    _ = arguments.device
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def unpin_fsdp_offload(trainer: Any) -> None:
    """Off-load to plain memory: page-locked memory needs an accelerator."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    trainer.accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
