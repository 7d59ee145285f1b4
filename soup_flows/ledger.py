"""The attempts of a run, one JSON line each in `attempts.jsonl`: kept by whoever launches, whatever happens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from soup_flows.errors import FailureClass
from soup_flows.json_text import parse_json
from soup_flows.spec import TrainingSpec

AttemptState = Literal["completed", "failed", "cancelled", "lost"]


class Change(BaseModel):
    """How an attempt differs from what was asked; what earlier attempts changed is kept in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_device_train_batch_size: int | None = None
    gradient_checkpointing: bool = False
    strategy: str | None = None
    """Another preset; it starts from `weights`, with a new optimizer."""
    weights: str | None = None
    """Checkpoint whose weights alone are taken, if the run has no newer one."""
    max_steps: int | None = None
    """Optimizer steps that were left when the strategy changed."""
    learning_rate_scale: float = 1.0
    skip_steps: tuple[int, ...] = ()
    max_step: int | None = None
    """Checkpoints after this step are not resumed from."""
    path: tuple[str, ...] = ()
    """One sentence per change, in order."""

    def then(self, sentence: str, **fields: Any) -> Change:
        """Return this change with `fields` set and `sentence` added to its path."""
        return self.model_copy(update={**fields, "path": (*self.path, sentence)})

    def apply(self, spec: TrainingSpec) -> TrainingSpec:
        """Return `spec` as this attempt runs it."""
        training: dict[str, Any] = {}
        if self.per_device_train_batch_size is not None:
            training["per_device_train_batch_size"] = self.per_device_train_batch_size
        if self.gradient_checkpointing:
            training["gradient_checkpointing"] = True
        if self.max_steps is not None:
            training["max_steps"] = self.max_steps
        changes: dict[str, Any] = {"training": spec.training.model_copy(update=training)}
        if self.strategy is not None:
            kind = "deepspeed" if self.strategy.startswith("zero") else "fsdp"
            changes |= {"deepspeed": None, "fsdp": None, "strategy": "auto", kind: self.strategy}
        return spec.model_copy(update=changes)


class Measured(BaseModel):
    """Memory of the fullest rank beside its prediction, in bytes, as torch's allocator counts it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peak_bytes: int
    """The peak; after `out_of_memory` what was held and asked for in vain, the least that is needed."""
    predicted_bytes: int
    factor: float
    """On the inexact parts of the plain prediction: activations, logits, copies, buffers, temporaries."""
    out_of_memory: bool
    settings: str
    """What ran, in words."""


class Attempt(BaseModel):
    """One line of the ledger."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    started: float
    """Unix time."""
    state: AttemptState
    failure_class: FailureClass | None = None
    cause: str = ""
    evidence: str = ""
    """Where to look: files in the run directory."""
    change: Change = Change()
    from_step: int = 0
    """Step of the checkpoint it started from; 0 is the model."""
    last_step: int = 0
    """Optimizer steps made, those before `from_step` included."""
    good_step: int = 0
    """Step of the newest checkpoint that was sealed when it ended."""
    steps_lost: int = 0
    """Steps made after that checkpoint, to be made again."""
    seconds: float = 0.0
    """Wall time."""
    gpu_hours: float = 0.0
    """Wall time of all ranks together, in hours; on CPU ranks too."""
    gpu_hours_wasted: float = 0.0
    """Part of it that a later attempt has to spend again: start-up and lost steps."""
    cost: float | None = None
    """`gpu_hours` times `recovery.gpu_hour_price`."""
    memory: Measured | None = None
    """What it needed against what was predicted; it corrects later predictions."""
    energy_joules: float | None = None
    """What its GPUs used, by NVML's counters; None where one of them has none, and for a lost attempt."""


def read_ledger(path: Path) -> tuple[Attempt, ...]:
    """Return the attempts in order; a torn or foreign line is skipped, of two with a number the last counts."""
    found: dict[int, Attempt] = {}
    with contextlib.suppress(OSError):
        for line in path.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError, ValidationError):
                row = Attempt.model_validate(parse_json(line))
                found[row.number] = row
    return tuple(found[number] for number in sorted(found))


def append(path: Path, row: Attempt) -> None:
    """Append one attempt and flush it to the disk; a line that was torn by a crash stays alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, b"\n" * torn + row.model_dump_json().encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)


def count(rows: Sequence[Attempt], failure_class: FailureClass) -> int:
    """Return how many attempts ended for this cause."""
    return sum(row.failure_class == failure_class for row in rows)
