"""`TrainReport`: what a run did, read from its run directory alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from soup_flows.errors import FailureClass, Problem
from soup_flows.ledger import Attempt
from soup_flows.paths import RunPaths, write_atomic
from soup_flows.proof import Proof
from soup_flows.sharding import ShardingPlan
from soup_flows.store import Mirrored

RunState = Literal["completed", "failed", "cancelled", "refused"]


class Point(BaseModel):
    """Metrics of one optimizer step; a missing number was not finite or not measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    """Wall time since the previous point."""


class RankMemory(BaseModel):
    """Peak memory of one rank, in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    host_peak_bytes: int
    device_peak_allocated_bytes: int | None = None
    device_peak_reserved_bytes: int | None = None


class SavedCheckpoint(BaseModel):
    """A checkpoint that was sealed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    path: str
    bytes: int
    seconds: float
    """Wall time of the save, hashing and reading back included."""


class Resumed(BaseModel):
    """Proof of a resume: the first step after it beside the last one before it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """First optimizer step that was logged after the resume."""
    from_step: int
    checkpoint: str
    weights_only: bool
    loss: float | None = None
    loss_before: float | None = None
    learning_rate: float | None = None
    learning_rate_before: float | None = None


class Stopped(BaseModel):
    """Where the ranks stopped because they were asked to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    saved: bool
    last_saved: int | None = None

    def __str__(self) -> str:
        if self.saved:
            return f"saved at step {self.step}"
        good = f"step {self.last_saved}" if self.last_saved is not None else "none"
        return f"stopped at step {self.step}, not saved, last good checkpoint: {good}"


class EarlyStop(BaseModel):
    """Why training ended before its last planned step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    best_step: int
    waited: int
    """Evaluations in a row without an improvement."""


class BestModel(BaseModel):
    """Which weights became the final model, under `training.load_best_model_at_end`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    eval_loss: float
    """Held-out loss, measured on the final model."""
    checkpoint: str | None = None
    """Where they were loaded from; None when the last step was the best."""
    last_step: int
    last_eval_loss: float


class TrainReport(BaseModel):
    """What ran, what was proven, what came out, and where everything is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    run_dir: str
    state: RunState
    failure_class: FailureClass | None = None
    cause: str = ""
    advice: str = ""
    problems: tuple[Problem, ...] = ()
    """Findings of the validation, or what the run was refused for."""
    plan: ShardingPlan | None = None
    attempts: int = 0
    ledger: tuple[Attempt, ...] = ()
    """Every attempt of the run, the last one included."""
    started_from: int = 0
    """Step of the checkpoint that the last attempt resumed; 0 is the model."""
    resumed: Resumed | None = None
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    """Sealed by the last attempt; older ones than `recovery.save_total_limit` are gone."""
    save_failures: tuple[str, ...] = ()
    mirrored: tuple[Mirrored, ...] = ()
    """What the last attempt brought to the checkpoint store, confirmed."""
    mirror_failures: tuple[str, ...] = ()
    set_aside: tuple[str, ...] = ()
    """Checkpoints that did not verify before the last attempt: where each is, and why."""
    stopped_at: Stopped | None = None
    early_stop: EarlyStop | None = None
    best: BestModel | None = None
    proof: Proof | None = None
    steps: int = 0
    """Optimizer steps made."""
    total_steps: int | None = None
    """Optimizer steps planned."""
    train: tuple[Point, ...] = ()
    evaluations: tuple[Point, ...] = ()
    memory: tuple[RankMemory, ...] = ()
    train_rows: int | None = None
    eval_rows: int | None = None
    seconds: float = 0.0
    """Wall time of the last attempt, from the supervisor's start to its end."""
    start_seconds: float | None = None
    """Wall time from the supervisor's start to the end of the first optimizer step."""
    model: str | None = None
    """Folder of the final model, once it was saved and read back."""
    saved: dict[str, int] = {}
    """Tensors, elements and bytes that were read back from `model`."""
    last_lines: dict[str, tuple[str, ...]] = {}
    """Of a run that did not complete: the last lines of the launcher and of every rank, by log."""

    @property
    def first_loss(self) -> float | None:
        """Loss of the first optimizer step."""
        return self.train[0].loss if self.train else None

    @property
    def final_loss(self) -> float | None:
        """Loss of the last optimizer step."""
        return self.train[-1].loss if self.train else None

    @property
    def first_eval_loss(self) -> float | None:
        """Loss on the held-out rows before training."""
        return self.evaluations[0].loss if self.evaluations else None

    @property
    def eval_loss(self) -> float | None:
        """Loss on the held-out rows after training."""
        return self.evaluations[-1].loss if self.evaluations else None

    @classmethod
    def load(cls, run_dir: str | Path) -> TrainReport:
        """Read the report of a run directory.

        Raises:
            FileNotFoundError: if the run has not ended yet.
        """
        return cls.model_validate_json(RunPaths(Path(run_dir)).report.read_bytes())

    def save(self) -> Path:
        """Write the report into its run directory."""
        paths = RunPaths(Path(self.run_dir)).create()
        return write_atomic(paths.report, self.model_dump_json(indent=2) + "\n")
