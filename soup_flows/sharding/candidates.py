"""Every way to run what was asked, each with its predicted memory, whether it fits, and its expected cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from soup_flows.architecture import Architecture
from soup_flows.batch import DEFAULT_MICRO_BATCH
from soup_flows.deepspeed import get_deepspeed_config
from soup_flows.hardware import Hardware
from soup_flows.memory import MemoryEstimate, Setup, predict
from soup_flows.memory.estimate import MARGIN
from soup_flows.memory.setup import parse_setup
from soup_flows.sharding.asked import BatchAsked, World, decide_optimizer, shards_method, whole_number
from soup_flows.sharding.costs import Rates, rates, step_cost
from soup_flows.sharding.values import Candidate, Correction, Dtype, Room
from soup_flows.spec import TrainingSpec
from soup_flows.units import gib

GIB = 1 << 30
CPU_PROCESS = int(0.6 * GIB)
"""Bytes of a CPU rank before the model: Python, torch and transformers (resident size, torch 2.13)."""

LEVELS: dict[str, int] = {
    "single": 0,
    "ddp": 0,
    "shard_grad": 1,
    "zero1": 1,
    "zero2": 1,
    "full_shard": 2,
    "zero3": 2,
    "hybrid_shard": 2,
    "zero++": 2,
    "zero2_offload": 3,
    "full_offload": 4,
    "zero3_offload": 4,
    "zero3_nvme": 5,
}
"""How far each strategy goes: nothing, optimizer and gradients, parameters, optimizer off-loaded, parameters
off-loaded, NVMe. FSDP stands first within a level: its memory can be traced, and its traffic is overlapped."""


@dataclass(frozen=True)
class Case:
    """What is planned: the model, the machine and what was asked, with what follows from them."""

    spec: TrainingSpec
    hardware: Hardware
    world: World
    dtype: Dtype
    dtype_reason: str
    model: Architecture | None
    """Its shapes; None where they are not known."""
    no_model: str
    """Why not."""
    batch: BatchAsked
    named: str | None
    """The strategy that was named; None where the planner may choose."""
    named_reason: str
    user_config: dict[str, Any] | None
    correction: Correction | None = None
    """What an earlier attempt measured."""

    @property
    def shapes(self) -> Architecture:
        """The model, where it is known."""
        assert self.model is not None
        return self.model

    @cached_property
    def room(self) -> Room:
        """What the run may use."""
        usable = self.hardware.host_memory.usable_bytes
        if self.world.device == "cpu":
            return Room(device=usable // self.world.ranks_per_node, host=usable)
        free = min(gpu.memory_free_bytes for gpu in self.hardware.gpus[: self.world.ranks_per_node])
        disk = next((d for d in self.hardware.disks if d.path == self.spec.nvme_path), None)
        return Room(device=free, host=usable, nvme=disk.free_bytes if disk else None)

    @cached_property
    def rate(self) -> Rates:
        """What the machine can do."""
        return rates(self.hardware, self.world.device, self.world.ranks_per_node, self.world.nodes)

    def setup(
        self, strategy: str, world_size: int, micro: int, checkpointing: bool, seq_len: int = 0
    ) -> Setup:
        """Return how the training program would train, as far as memory depends on it.

        Rows are laid end to end without padding, so `micro * max_length` tokens are the most a pass can
        have; logits are computed at the trained positions, all of them at most.
        """
        spec = self.spec
        share = max(1, self.batch.total // world_size)
        return parse_setup(
            {
                "method": spec.training.method,
                "strategy": strategy,
                "world_size": world_size,
                "ranks_per_node": max(1, world_size // self.world.nodes),
                "per_device_train_batch_size": micro,
                "gradient_accumulation_steps": max(1, share // micro),
                "seq_len": seq_len or spec.data.max_length,
                "dtype": self.dtype,
                "optimizer": decide_optimizer(spec, self.world.device, strategy)[0],
                "gradient_checkpointing": checkpointing,
                "attention": self._attention,
                "loss": "pieces" if self._in_pieces else "full",
                "loss_outside": True,
                "adapters_fp32": False if spec.training.method == "qlora" else None,
                "lora_r": spec.lora.r,
                "lora_dropout": spec.lora.dropout,
                "lora_targets": targets
                if isinstance(targets := spec.lora.target_modules, str)
                else tuple(targets),
                **self._engine_settings(strategy),
            }
        )

    @property
    def _in_pieces(self) -> bool:
        """Whether the training program can make the loss in pieces (`training.trainer.SoupTrainer.token_loss`)."""
        spec = self.spec
        adapted = spec.trains_adapters and "lm_head" in spec.lora.target_modules
        return self.shapes.plain_head and spec.data.packing and not adapted

    @cached_property
    def _attention(self) -> str:
        """Whether rows are padded, and whether PyTorch has a fused kernel for grouped keys and values here.

        Its flash kernel takes them, in 16 bit and from compute capability 8.0 on; the memory-efficient one
        does not, and the fallback keeps all scores (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
        """
        if not self.spec.data.packing:
            return "sdpa"
        grouped = any(layer.k_width < layer.q_width for layer in self.shapes.layers)
        old = any(gpu.bf16 is False for gpu in self.hardware.gpus[: self.world.ranks_per_node])
        return (
            "eager" if self.world.device == "cuda" and grouped and (old or self.dtype == "fp32") else "rows"
        )

    def _engine_settings(self, strategy: str) -> dict[str, Any]:
        """Return what the DeepSpeed JSON decides: bucket sizes, and what a user's own one off-loads."""
        if not strategy.startswith("zero"):
            return {}
        own = self.user_config if strategy == self.named else None
        zero = (own or get_deepspeed_config(strategy)).get("zero_optimization", {})
        found: dict[str, Any] = {}
        if (bucket := whole_number(zero.get("reduce_bucket_size")) or 0) > 0:
            found["bucket_elements"] = bucket
        if own is not None:
            blocks = {"optimizer": zero.get("offload_optimizer"), "params": zero.get("offload_param")}
            found["offload"] = tuple(
                name
                for name, block in blocks.items()
                if isinstance(block, dict) and block.get("device", "none") != "none"
            )
        return found

    def predict(self, setup: Setup) -> MemoryEstimate:
        """Predict the memory of one rank.

        Raises:
            Refused: if an adapter target names no module.
        """
        return predict(
            self.shapes, setup=setup, correction=self.correction.factor if self.correction else 1.0
        )

    def required(self, estimate: MemoryEstimate) -> int:
        """Return the memory of the device below which a rank is refused."""
        if self.world.device == "cpu":
            return int(estimate.allocated_bytes / MARGIN) + CPU_PROCESS
        return estimate.minimum_bytes

    def shortages(self, estimate: MemoryEstimate) -> list[str]:
        """Say what does not fit, with the figures; an empty list if everything does."""
        room, found = self.room, []
        if (needed := self.required(estimate)) > room.device:
            what = "host memory per rank" if self.world.device == "cpu" else "free GPU memory"
            found.append(f"needs {gib(needed)} of {what}, there are {gib(room.device)}")
        if estimate.host.step > room.host:
            found.append(f"needs {gib(estimate.host.step)} of host memory, {gib(room.host)} can be used")
        if room.nvme is not None and estimate.host.nvme > room.nvme:
            found.append(f"needs {gib(estimate.host.nvme)} in the NVMe folder, {gib(room.nvme)} are free")
        return found

    def candidate(self, strategy: str, world_size: int, micro: int, checkpointing: bool) -> Candidate:
        """Return one candidate: predicted, judged and priced."""
        setup = self.setup(strategy, world_size, micro, checkpointing)
        estimate = self.predict(setup)
        short = self.shortages(estimate)
        return Candidate(
            strategy=strategy,
            world_size=world_size,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=setup.gradient_accumulation_steps,
            gradient_checkpointing=checkpointing,
            allocated_bytes=estimate.allocated_bytes,
            required_bytes=self.required(estimate),
            host_bytes=estimate.host.step,
            nvme_bytes=estimate.host.nvme,
            load_bytes=estimate.host.load,
            fits=not short,
            cost=step_cost(self.shapes, setup, self.rate),
            why_not="; ".join(short),
        )

    def strategies(self) -> list[tuple[str, int]]:
        """Return the strategies to consider, each with its ranks; the named one is always among them."""
        size = self.world.size
        if self.world.device == "cpu":
            return [(self.named or ("ddp" if size > 1 else "single"), size)]
        if size == 1:
            names = ["single", "zero2_offload", "zero3_offload"]
        else:
            names = ["ddp", "shard_grad", "zero1", "zero2", "full_shard", "zero3"]
            names += ["zero2_offload", "full_offload", "zero3_offload"]
            if self.world.nodes > 1 and self.world.ranks_per_node > 1:
                names += ["hybrid_shard", "zero++"]
        if self.spec.nvme_path:
            names.append("zero3_nvme")
        if self.named and self.named not in names:
            names.append(self.named)
        found = [(name, size) for name in names if shards_method(self.spec, name)]
        if self.world.auto and self.named is None and size > 1 and self.world.nodes == 1:
            found.append(("single", 1))
        return found


def all_candidates(case: Case) -> list[Candidate]:
    """Return every candidate, those that the user's settings exclude too.

    Raises:
        Refused: if an adapter target names no module.
    """
    found = []
    for strategy, size in case.strategies():
        free = BatchAsked(case.batch.total, None, "").micro_batches(size, DEFAULT_MICRO_BATCH)
        micros = sorted({*case.batch.micro_batches(size, DEFAULT_MICRO_BATCH), *free}, reverse=True)
        found += [case.candidate(strategy, size, m, on) for m in micros for on in (False, True)]
    return found
