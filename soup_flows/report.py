"""`TrainReport`: what a run did, read from its run directory alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from soup_flows.errors import FailureClass, Problem
from soup_flows.launch.events import tail_events
from soup_flows.paths import AttemptPaths, RunPaths, write_atomic
from soup_flows.proof import Proof
from soup_flows.sharding import ShardingPlan

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


def read_attempt(attempt: AttemptPaths) -> dict[str, Any]:
    """Collect what an attempt's events and result say, as fields of `TrainReport`.

    Torn lines and unknown events are skipped; a folder without events gives an empty report.
    """
    found: dict[str, Any] = {"train": [], "evaluations": [], "memory": []}
    started = None
    for event in tail_events(attempt.events).poll():
        kind, numbers = event.get("kind"), event
        if kind == "started" and started is None:
            started = event.get("time")
        elif kind == "proof":
            found["proof"] = Proof.model_validate({k: event[k] for k in Proof.model_fields if k in event})
        elif kind == "metrics" and "loss" in numbers:
            found["train"].append(_point(numbers, "loss"))
            found["steps"] = event["step"]
        elif kind == "evaluation":
            found["evaluations"].append(_point(numbers, "eval_loss"))
        elif kind == "data":
            found.update({k: event[k] for k in ("train_rows", "eval_rows", "total_steps")})
        elif kind == "memory":
            fields = {k: event[k] for k in RankMemory.model_fields if k in event}
            if not any(m.rank == fields["rank"] for m in found["memory"]):
                found["memory"].append(RankMemory.model_validate(fields))
        if kind == "metrics" and started is not None and "start_seconds" not in found:
            found["start_seconds"] = event["time"] - started
    found["memory"].sort(key=lambda memory: memory.rank)
    try:
        result = json.loads(attempt.result.read_text())
    except (OSError, ValueError):
        return found
    found.update(steps=result["step"], model=result["model"], saved=result["saved"])
    return found


def _point(event: dict[str, Any], loss: str) -> Point:
    """Take the metrics of one event."""
    return Point(
        step=event["step"],
        loss=event.get(loss),
        **{k: event.get(k) for k in ("learning_rate", "grad_norm", "seconds")},
    )
