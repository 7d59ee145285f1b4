"""What the planner answers: `ShardingPlan`, and the `Candidate`s it was chosen from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from soup_flows.batch import Batch, Steps
from soup_flows.memory import MemoryEstimate

Engine = Literal["deepspeed", "fsdp", "ddp", "single"]
Dtype = Literal["bf16", "fp16", "fp32"]
OptimizerName = Literal["adamw_torch", "adamw_torch_fused"]
Device = Literal["cuda", "cpu"]

HOST_BOUND = 1.5
"""Factor between what is off-loaded and the upper bound that `memory` gives for it (pinned copies)."""


class Value(BaseModel):
    """Base of the values: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StepCost(Value):
    """Expected seconds of one optimizer step and their parts. Good for ranking, not for a timetable."""

    compute: float
    """Forward and backward pass."""
    recompute: float
    """The second forward pass of gradient checkpointing."""
    optimizer: float
    """The update, on the GPU or by the CPU."""
    communication: float
    """What compute cannot hide of collectives between the ranks."""
    offload: float
    """Traffic between the GPU and host memory or NVMe."""
    overhead: float
    """Kernel launches, and the engine's own work per layer and pass."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        parts = (self.compute, self.recompute, self.optimizer)
        return sum(parts) + self.communication + self.offload + self.overhead


class Room(Value):
    """What a run may use, in bytes. None: not known, so not judged."""

    device: int
    """Free memory of the fullest GPU of the run; for CPU ranks, each rank's share of host memory."""
    host: int
    """Host memory of one machine."""
    nvme: int | None = None
    """Free space of the NVMe folder."""

    def shortage(self, candidate: Candidate) -> float:
        """Return how many times a candidate exceeds the scarcest memory; host memory by its likely need."""
        host = max(candidate.host_bytes / HOST_BOUND, candidate.load_bytes) / max(1, self.host)
        return max(candidate.required_bytes / max(1, self.device), host)


class Candidate(Value):
    """One way to run the same optimizer steps: needs, cost, and why it was or was not chosen."""

    strategy: str
    world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    allocated_bytes: int
    """Predicted peak of one rank, as `torch.cuda.max_memory_allocated` would show it."""
    required_bytes: int
    """Free memory of a GPU below which it is refused: the prediction with margin."""
    host_bytes: int
    """Host memory of one machine for what is off-loaded, an upper bound."""
    nvme_bytes: int
    """NVMe space of one machine."""
    load_bytes: int
    """Host memory of one machine while the weights are read, an upper bound."""
    fits: bool
    cost: StepCost
    relative_cost: float = 1.0
    """Expected time of a step, the chosen candidate's being 1."""
    chosen: bool = False
    why_not: str = ""
    """Why it was not chosen; empty for the chosen one, unless that does not fit either."""

    @property
    def passes(self) -> str:
        """Its batch in words: rows per rank and pass times passes."""
        return f"{self.per_device_train_batch_size} x {self.gradient_accumulation_steps}"

    @property
    def label(self) -> str:
        """Its settings in words."""
        on = " with gradient checkpointing" if self.gradient_checkpointing else ""
        return f"{self.strategy}, micro batch {self.per_device_train_batch_size}{on}"


class Correction(Value):
    """What an earlier run of the same work taught about the prediction."""

    factor: float
    """On the predicted activations, logits, copies, buffers and temporaries; weights, gradients and optimizer
    state are exact."""
    reason: str
    """Which attempt measured what."""


class ShardingPlan(Value):
    """What will run on every rank. The launcher and the ranks read nothing else.

    `reasons` maps each value that was chosen automatically to one sentence that says why.
    """

    strategy: str
    """`single`, `ddp`, or a preset's name; for a user's own JSON the preset it comes closest to."""
    engine: Engine
    device: Device
    world_size: int
    """Ranks over all nodes."""
    nodes: int = 1
    dtype: Dtype
    """Compute dtype."""
    optimizer: OptimizerName
    gradient_checkpointing: bool = False
    """Whether activations are recomputed in the backward pass."""
    batch: Batch
    rows: int | None = None
    """Training rows found in the data set; None when they cannot be counted before the launch."""
    steps: Steps | None = None
    """Real optimizer steps; None when `rows` is None."""
    tokens_per_step: int | None = None
    """Most tokens in one optimizer step: the global batch times the maximum length."""
    config: dict[str, Any]
    """The DeepSpeed JSON, or what `TrainingArguments(fsdp_config=...)` takes; empty for `single` and `ddp`."""
    parallelism: dict[str, int] | None = None
    """`hybrid_shard` on several nodes: the sizes for accelerate's `ParallelismConfig`."""
    config_source: str
    """The preset or the file the config comes from."""
    reason: str
    """Why this strategy, in one sentence."""
    reasons: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    """One line per value that a preset or file had and that was adapted (old -> new, and why), and what could
    not be known."""
    memory: MemoryEstimate | None = None
    """Predicted memory of one rank; None where the model's config is not here."""
    correction: Correction | None = None
    """How earlier measurements changed the prediction; None where there are none."""
    room: Room | None = None
    """What the prediction was held against; None without one."""
    candidates: tuple[Candidate, ...] = ()
    """Everything that was considered, the chosen one first, then by cost; empty without a prediction."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.world_size // self.nodes

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that will run."""
        return next((candidate for candidate in self.candidates if candidate.chosen), None)


def engine_of(strategy: str) -> Engine:
    """Name what wraps the model under `strategy`."""
    if strategy in ("single", "ddp"):
        return "single" if strategy == "single" else "ddp"
    return "deepspeed" if strategy.startswith("zero") else "fsdp"
