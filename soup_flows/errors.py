"""What can go wrong, as values and typed exceptions.

`Problem` is one finding before a launch; `Refused` carries all of them at once. `TrainingFailed` and its
subclasses are the ends of a run that did start, one per failure class of the report. Every exception survives
pickling, because results and states of tasks are pickled.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Severity = Literal["error", "warning", "note"]

FailureClass = Literal[
    "cuda_oom",
    "host_oom",
    "shm_full",
    "disk_full",
    "nccl_timeout",
    "stalled",
    "rank_killed",
    "node_lost",
    "preempted",
    "cancelled",
    "timeout",
    "auth",
    "not_found",
    "bad_config",
    "bad_data",
    "nan_loss",
    "import_error",
    "code_error",
    "proof_failed",
    "unknown",
]


class Problem(BaseModel):
    """One thing that is wrong, in the words of the person who wrote the spec."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    """Stable id of the rule, such as `DS014`."""
    severity: Severity
    field: str
    """Dotted path of the setting, such as `training.learning_rate`."""
    message: str
    """What was found and what would happen."""
    fix: str = ""
    """What to write instead."""
    source: str = ""
    """Where the rule comes from: an issue, a line of a library's source, a measurement."""

    def __str__(self) -> str:
        fix = f" Fix: {self.fix}" if self.fix else ""
        return f"[{self.id}] {self.field}: {self.message}{fix}"


class SoupFlowsError(Exception):
    """Base of every error this package raises on purpose."""


class Refused(SoupFlowsError, ValueError):
    """The run was refused before anything was started.

    Attributes:
        problems: every problem that was found, errors first.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: ("error", "warning", "note").index(p.severity)))
        errors = [p for p in self.problems if p.severity == "error"] or list(self.problems)
        head = "refused" if len(errors) == 1 else f"refused: {len(errors)} problems"
        super().__init__(f"{head}: " + "\n".join(str(p) for p in errors))

    @property
    def failure_class(self) -> FailureClass:
        """Class of a run in which a rank raised this: the rules of data are called DATA and a number."""
        return "bad_data" if any(p.id.startswith("DATA") for p in self.problems) else "bad_config"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class TrainingFailed(SoupFlowsError):
    """A started run did not end well.

    Attributes:
        failure_class: one of `FailureClass`.
        cause: one sentence, plain language.
        advice: what to do about it.
        run_dir: the folder that explains the run.
        step: optimizer steps that were made.
        tried: what earlier attempts of the run changed, in order.
    """

    def __init__(
        self,
        failure_class: FailureClass,
        cause: str,
        advice: str = "",
        run_dir: str = "",
        *,
        step: int = 0,
        tried: Sequence[str] = (),
    ) -> None:
        self.failure_class: FailureClass = failure_class
        self.cause = cause
        self.advice = advice
        self.run_dir = run_dir
        self.step = step
        self.tried = tuple(tried)
        parts = [f"{failure_class} after step {step}: {cause}" if step else f"{failure_class}: {cause}"]
        if self.tried:
            parts.append("Tried before: " + "; ".join(self.tried))
        if advice:
            parts.append(f"What to do: {advice}")
        if run_dir:
            parts.append(f"Everything about the run: {run_dir}")
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        build = partial(type(self), step=self.step, tried=self.tried)
        return build, (self.failure_class, self.cause, self.advice, self.run_dir)


def refuse(rule: str, field: str, message: str, fix: str = "", source: str = "") -> Refused:
    """Return a `Refused` with a single error, ready to be raised."""
    return Refused([Problem(id=rule, severity="error", field=field, message=message, fix=fix, source=source)])


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the closest of `choices`, or an empty string."""
    found = difflib.get_close_matches(str(name), list(choices), n=1, cutoff=0.5)
    return f"did you mean {found[0]!r}?" if found else ""
