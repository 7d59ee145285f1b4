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

from pydantic import BaseModel, ConfigDict, field_validator

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
    "cluster_silent",
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


MESSAGE_LIMIT = 10_000
"""Characters of one text of a problem."""


def printable(text: str) -> str:
    """Return `text` with control characters, but for line ends, as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


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

    @field_validator("field", "message", "fix")
    @classmethod
    def _printable(cls, text: str) -> str:
        """Write control characters as escapes, so that no file drives a terminal, and leave no text without end."""
        return printable(text if len(text) <= MESSAGE_LIMIT else f"{text[:MESSAGE_LIMIT]}... (cut)")

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
    """A started run did not end well; the advice stands first.

    `TrainingFailed("cuda_oom", ...)` makes a `CudaOutOfMemory`, and so on for every class in `FAILURES`.

    Attributes:
        failure_class: one of `FailureClass`.
        cause: one sentence, plain language.
        advice: what to do about it.
        run_dir: the folder that explains the run.
        step: optimizer steps that were made.
        tried: what earlier attempts of the run changed, in order.
    """

    def __new__(cls, failure_class: FailureClass, *_: str, **__: object) -> TrainingFailed:
        """Make the subclass of `failure_class`."""
        return super().__new__(FAILURES[failure_class] if cls is TrainingFailed else cls)

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
            parts.insert(0, f"What to do: {advice}")
        if run_dir:
            parts.append(f"Everything about the run: {run_dir}")
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        build = partial(type(self), step=self.step, tried=self.tried)
        return build, (self.failure_class, self.cause, self.advice, self.run_dir)


class CudaOutOfMemory(TrainingFailed):
    """A GPU's memory did not suffice."""


class HostOutOfMemory(TrainingFailed):
    """The host's memory, or its control group's limit, did not suffice."""


class SharedMemoryFull(TrainingFailed):
    """`/dev/shm` was full."""


class DiskFull(TrainingFailed):
    """A disk was full, or a quota used up."""


class CollectiveTimeout(TrainingFailed):
    """A collective operation took longer than its limit."""


class Stalled(TrainingFailed):
    """The ranks made no step for too long."""


class RankKilled(TrainingFailed):
    """A rank, the launcher or the supervisor was killed or crashed."""


class NodeLost(TrainingFailed):
    """A host went away."""


class ClusterSilent(TrainingFailed):
    """The cluster stopped answering; its job may still run, and the next start of the run attaches to it."""


class Preempted(TrainingFailed):
    """A scheduler took the machine back."""


class Cancelled(TrainingFailed):
    """Somebody stopped the run."""


class TimeLimit(TrainingFailed):
    """The run, or its wait for devices, took longer than allowed."""


class NotAllowed(TrainingFailed):
    """A model or data set needs rights that the run does not have."""


class NotFound(TrainingFailed):
    """A model, data set, revision or file does not exist."""


class BadConfig(TrainingFailed):
    """A setting was found wrong after the start."""


class BadData(TrainingFailed):
    """Rows were found wrong after the start."""


class NanLoss(TrainingFailed):
    """The loss became NaN or infinite."""


class ImportFailed(TrainingFailed):
    """A package is missing where the ranks run, or cannot be imported."""


class CodeError(TrainingFailed):
    """Any other exception of a rank."""


class ProofFailed(TrainingFailed):
    """What ran was not what was planned."""


class UnknownFailure(TrainingFailed):
    """The run left no trace of a cause."""


FAILURES: dict[FailureClass, type[TrainingFailed]] = {
    "cuda_oom": CudaOutOfMemory,
    "host_oom": HostOutOfMemory,
    "shm_full": SharedMemoryFull,
    "disk_full": DiskFull,
    "nccl_timeout": CollectiveTimeout,
    "stalled": Stalled,
    "rank_killed": RankKilled,
    "node_lost": NodeLost,
    "cluster_silent": ClusterSilent,
    "preempted": Preempted,
    "cancelled": Cancelled,
    "timeout": TimeLimit,
    "auth": NotAllowed,
    "not_found": NotFound,
    "bad_config": BadConfig,
    "bad_data": BadData,
    "nan_loss": NanLoss,
    "import_error": ImportFailed,
    "code_error": CodeError,
    "proof_failed": ProofFailed,
    "unknown": UnknownFailure,
}
"""The exception of each failure class."""


def refuse(rule: str, field: str, message: str, fix: str = "", source: str = "") -> Refused:
    """Return a `Refused` with a single error, ready to be raised."""
    return Refused([Problem(id=rule, severity="error", field=field, message=message, fix=fix, source=source)])


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the closest of `choices`, or an empty string."""
    found = difflib.get_close_matches(str(name), list(choices), n=1, cutoff=0.5)
    return f"did you mean {found[0]!r}?" if found else ""


def first_line(error: BaseException, most: int | None = None) -> str:
    """Return the first line of what an error says, `most` characters of it; its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:most]


def kind_and_line(error: BaseException) -> str:
    """Return kind and first line of an error, 300 characters at most."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
