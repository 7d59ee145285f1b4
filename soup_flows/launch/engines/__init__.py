"""Where the ranks run: one protocol, and engines for this machine, a Slurm cluster and a Ray cluster.

All engines run the same rank program on the same run directory, so a result does not depend on the engine, and
whether a run succeeded is read from that directory, never from an exit code or an engine's word alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from soup_flows.errors import Problem
from soup_flows.json_text import parse_json
from soup_flows.launch.events import last_lines
from soup_flows.launch.plan import LaunchPlan
from soup_flows.paths import AttemptPaths, RunPaths

State = Literal["QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "LOST"]
ENDED: tuple[State, ...] = ("SUCCEEDED", "FAILED", "CANCELLED", "LOST")


class Handle(BaseModel):
    """What finds a submitted run again; plain JSON, also for another process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Literal["local", "slurm", "ray"]
    run_id: str
    run_dir: str
    """The run directory, absolute."""
    job: str = Field(min_length=1)
    """The engine's own name of the work: the supervisor's PID, Slurm's job id, or Ray's submission id."""

    @property
    def paths(self) -> RunPaths:
        """The files of the run."""
        return RunPaths(Path(self.run_dir))


class Status(BaseModel):
    """How a submitted run is at present."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: State
    reason: str = ""
    """Why it waits or how it ended, in the engine's words."""
    attempt: int = Field(1, ge=1)
    """Number of the attempt; an engine that starts a job again by itself begins a new one."""

    @property
    def ended(self) -> bool:
        """Whether nothing of the run is queued or running."""
        return self.state in ENDED


class LogLine(NamedTuple):
    """One line that a part of the run printed."""

    source: str
    """`rank_0`, `launcher` or the engine's name."""
    text: str


class Engine(Protocol):
    """Starts, finds, watches and ends a run; one object serves one run at a time."""

    def check(self, launch: LaunchPlan) -> list[Problem]:
        """Return why `launch` could never run here, without starting anything."""
        ...

    def submit(self, launch: LaunchPlan) -> Handle:
        """Start the attempt; while one of the same run id is alive, return its handle instead.

        Raises:
            Refused: if the engine does not take it.
        """
        ...

    def attach(self, paths: RunPaths) -> Handle | None:
        """Return the handle of the run in this directory if it is alive, else None.

        Raises:
            Refused: if the engine cannot be asked.
        """
        ...

    def status(self, handle: Handle, within_s: float = 0.0) -> Status:
        """Return how the run is; waits at most `within_s` seconds for its end."""
        ...

    def logs(self, handle: Handle, count: int = 40) -> Sequence[LogLine]:
        """Return the last `count` lines of everything that printed in the present attempt."""
        ...

    def cancel(self, handle: Handle, reason: str) -> dict[str, Any]:
        """End what is left of the run and return the attempt's receipt; nothing of it runs after that.

        The ranks save first where the stop budget allows. A second call returns the same.

        Args:
            handle: the run.
            reason: why, for the receipt; empty for one that has ended by itself.
        """
        ...


def read_logs(attempt: AttemptPaths, count: int) -> list[LogLine]:
    """Return the last `count` lines of every log of an attempt."""
    found = sorted(attempt.logs.glob("*.log"))
    return [LogLine(path.stem, text) for path in found for text in last_lines(path, count)]


def finished(attempt: AttemptPaths) -> bool:
    """Whether the ranks saved and verified the model: the only proof of success."""
    try:
        value = parse_json(attempt.result.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and value.get("finished") is True
