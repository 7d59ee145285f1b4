"""What the events and results of a run's attempts say, as fields of a `TrainReport`; any folder can be read."""

from __future__ import annotations

import contextlib
from typing import Any

from pydantic import BaseModel, ConfigDict

from soup_flows.json_text import parse_object
from soup_flows.launch.events import read_events
from soup_flows.paths import AttemptPaths, RunPaths
from soup_flows.proof import Proof
from soup_flows.report import BestModel, EarlyStop, Point, RankMemory, Resumed, SavedCheckpoint, Stopped
from soup_flows.store import Mirrored


class Begun(BaseModel):
    """The event `started` of rank 0."""

    model_config = ConfigDict(frozen=True)

    time: float | None = None
    """Unix time."""
    from_step: int = 0
    set_aside: tuple[str, ...] = ()


class Counts(BaseModel):
    """The event `data`."""

    model_config = ConfigDict(frozen=True)

    train_rows: int | None
    eval_rows: int | None
    total_steps: int | None


class Result(BaseModel):
    """`result.json`: rank 0 wrote and verified the model."""

    model_config = ConfigDict(frozen=True)

    step: int
    model: str
    saved: dict[str, int]

    @property
    def fields(self) -> dict[str, Any]:
        """As fields of `TrainReport`."""
        return {"steps": self.step, "model": self.model, "saved": self.saved}


_VALUES: dict[str, tuple[str, type[BaseModel]]] = {
    "proof": ("proof", Proof),
    "resumed": ("resumed", Resumed),
    "stopped": ("stopped_at", Stopped),
    "early_stop": ("early_stop", EarlyStop),
    "best": ("best", BestModel),
    "checkpoint": ("checkpoints", SavedCheckpoint),
    "mirrored": ("mirrored", Mirrored),
}
"""Events that become a value: the report's field and the value's type."""


def read_run(paths: RunPaths, number: int) -> dict[str, Any]:
    """Collect what attempt `number` says, with the metrics that it goes on from.

    Points of earlier attempts are kept up to the step that the next attempt resumed.
    """
    found: dict[str, Any] = {}
    train: list[Point] = []
    evaluations: list[Point] = []
    for n in range(1, number + 1):
        found = read_attempt(paths.attempt(n))
        start = found.get("started_from")
        if start is not None:  # an attempt that ended before it began changes nothing
            train = [point for point in train if point.step <= start]
            evaluations = [point for point in evaluations if point.step <= start]
        train += found["train"]
        evaluations += found["evaluations"]
    return found | {"train": train, "evaluations": evaluations}


def read_attempt(attempt: AttemptPaths) -> dict[str, Any]:
    """Collect what an attempt's events and result say, as fields of `TrainReport`.

    Torn lines, unknown events, and events that lack what they should hold are skipped; a folder without events
    gives an empty report.
    """
    found = _Found()
    for event in read_events(attempt.events):
        with contextlib.suppress(
            KeyError, TypeError, ValueError
        ):  # a full disk, or another version, wrote it
            found.take(event)
    fields = found.fields
    fields["save_failures"], fields["mirror_failures"] = (
        tuple(found.save_failures),
        tuple(found.mirror_failures),
    )
    fields["memory"].sort(key=lambda memory: memory.rank)
    with contextlib.suppress(OSError, ValueError):
        fields.update(Result.model_validate(parse_object(attempt.result.read_bytes())).fields)
    return fields


class _Found:
    """What the events of an attempt say so far."""

    def __init__(self) -> None:
        lists = ("train", "evaluations", "memory", "checkpoints", "mirrored")
        self.fields: dict[str, Any] = {name: [] for name in lists}
        self.save_failures: list[str] = []
        self.mirror_failures: list[str] = []
        self.started: float | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Take one event in, wholly or not at all."""
        kind, fields = event["kind"], self.fields
        if kind == "started" and self.started is None:
            begun = Begun.model_validate({k: event[k] for k in Begun.model_fields if k in event})
            fields |= {"started_from": begun.from_step, "set_aside": begun.set_aside}
            self.started = begun.time
        elif kind == "metrics" and "loss" in event:
            fields["train"].append(_point(event, "loss"))
            fields["steps"] = event["step"]
            if self.started is not None and "start_seconds" not in fields:
                fields["start_seconds"] = event["time"] - self.started
        elif kind == "evaluation":
            fields["evaluations"].append(_point(event, "eval_loss"))
        elif kind == "data":
            data = Counts.model_validate({k: event[k] for k in Counts.model_fields})
            fields |= data.model_dump()
        elif kind in _VALUES:
            name, model = _VALUES[kind]
            value = model.model_validate({k: event[k] for k in model.model_fields if k in event})
            if kind in ("checkpoint", "mirrored"):
                fields[name].append(value)
            else:
                fields[name] = value
        elif kind == "save_failed":
            self.save_failures.append(f"step {event['step']}: {event['reason']}")
        elif kind == "mirror_failed":
            self.mirror_failures.append(f"{event['what']}: {event['reason']}")
        elif kind == "memory":
            memory = RankMemory.model_validate({k: event[k] for k in RankMemory.model_fields if k in event})
            if not any(known.rank == memory.rank for known in fields["memory"]):
                fields["memory"].append(memory)


def _point(event: dict[str, Any], loss: str) -> Point:
    """Take the metrics of one event."""
    return Point(
        step=event["step"],
        loss=event.get(loss),
        **{k: event.get(k) for k in ("learning_rate", "grad_norm", "seconds")},
    )
