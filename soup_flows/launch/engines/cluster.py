"""What the engines of a cluster have in common: a job that outlives the flow, and a word that is not the truth.

A cluster is asked where a job is; how it ended is read from the run directory, which the flow and the job share.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from pydantic import ValidationError

from soup_flows.errors import Problem, Refused, refuse
from soup_flows.json_text import parse_json
from soup_flows.launch.engines import Handle, LogLine, State, Status, finished, read_logs
from soup_flows.launch.engines.silence import SHORT_S, Silence, done, given_up
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.receipt import collect_receipts, new_receipt
from soup_flows.paths import RunPaths, write_json

ASK_EVERY_S = 5.0
"""Seconds between two questions about a job; sites ask for few (`man 1 squeue`, PERFORMANCE)."""
SETTLE_S = 2.0
"""Seconds after which an end is believed, since a job that is started again passes through one."""
SILENCE_S = 1800.0
"""Seconds without an answer and without a sign of life after which a flow waits no longer."""
LATE_S = 90.0
"""The same for a job that says it finished: NFS may show a new file a minute late (`man 5 nfs`, acdirmax)."""


class Unanswered(Exception):
    """The cluster did not answer; nothing is known about the job."""

    final = False
    """Whether asking again would change nothing."""


class Job(Protocol):
    """What a cluster says about a job."""

    @property
    def state(self) -> str:
        """In the cluster's words."""
        ...

    @property
    def reason(self) -> str:
        """Why it waits or how it ended; may be empty."""
        ...

    @property
    def here(self) -> State | None:
        """The state in the words of an engine; None for one that this version does not know."""
        ...

    @property
    def text(self) -> str:
        """State and reason in one text."""
        ...


def alive(job: Job | None) -> bool:
    """Whether a job is queued or running."""
    return job is not None and job.here in ("QUEUED", "RUNNING")


class ClusterEngine(abc.ABC):
    """Runs the attempt as a job of a cluster; it goes on when the process that submitted it is gone."""

    name: ClassVar[Literal["slurm", "ray"]]
    title: ClassVar[str]
    """What people call it."""
    done: ClassVar[str]
    """The state of a job that says that it succeeded."""
    cancelled: ClassVar[str]
    """The state of a job that somebody cancelled."""
    ends: ClassVar[Mapping[str, str]]
    """Job state to the reason of a receipt, for an attempt that could leave none itself."""
    end_s: ClassVar[float]
    """Longest wait for the end of a cancelled job."""
    unanswered: ClassVar[tuple[str, str]]
    """Problem id and fix where the cluster does not answer."""

    def __init__(self, ask_every_s: float = ASK_EVERY_S, silence_s: float = SILENCE_S) -> None:
        """Remember nothing; every answer comes from the cluster or from the run directory.

        Args:
            ask_every_s: seconds between two questions about the job's state.
            silence_s: seconds without an answer and without a sign of life after which waiting ends.
        """
        self._ask_every_s, self._silence_s = ask_every_s, silence_s
        self._silence = Silence()
        self._ask_at = 0.0
        self._ended_at: float | None = None
        self._last: Status | None = None
        self._job: Job | None = None
        self._receipt: dict[str, Any] | None = None
        self._number = 1

    @abc.abstractmethod
    def check(self, launch: LaunchPlan) -> list[Problem]:
        """Return why `launch` could never run here, without starting anything."""

    @abc.abstractmethod
    def _start(self, launch: LaunchPlan) -> str:
        """Submit a job and return its id; raises Unanswered or Refused."""

    @abc.abstractmethod
    def _ask(self, handle: Handle) -> Job | None:
        """Return what the cluster says about a job, None if it knows none; raises Unanswered."""

    @abc.abstractmethod
    def _find(self, paths: RunPaths) -> list[str]:
        """Return the ids of the run's jobs that are queued or running, the newest last; raises Unanswered."""

    @abc.abstractmethod
    def _cancel(self, handle: Handle) -> bool:
        """Ask for the end of a job; returns whether that was heard, raises Unanswered."""

    @abc.abstractmethod
    def _said(self, handle: Handle, count: int) -> Sequence[str]:
        """Return the last lines that the job itself printed."""

    def submit(self, launch: LaunchPlan) -> Handle:
        """Submit the job, unless one of this run is queued or running, or has finished the attempt.

        Raises:
            Refused: if the cluster does not take it or does not answer.
        """
        running = self.attach(launch.paths)
        if running is None and finished(launch.attempt_paths):  # while nobody waited for it
            running = self._kept(launch.paths)
        if running is not None:
            return running
        self._last = self._receipt = self._ended_at = None
        try:
            return self._keep(launch.paths, self._start(launch))
        except Unanswered as error:
            raise self._silent(error) from None

    def attach(self, paths: RunPaths) -> Handle | None:
        """Find the run's job by the handle in its directory, else by its name, which is the run id.

        A cluster that has answered to this run before may be away for a short while.

        Raises:
            Refused: if the cluster does not answer: a second job of the run would write into its directory.
        """
        known = self._kept(paths)
        end = time.monotonic() + (min(SHORT_S, self._silence_s) if known else 0.0)
        while True:
            try:
                if known is not None and alive(self._ask_again(known)):
                    return known
                found = self._find(paths)
                return self._keep(paths, found[-1]) if found else None
            except Unanswered as error:
                if error.final or time.monotonic() >= end:
                    raise self._silent(error) from None
            time.sleep(1.0)

    def _ask_again(self, handle: Handle) -> Job | None:
        """Ask about a job that may be just ending."""
        return self._ask(handle)

    def _silent(self, error: Unanswered) -> Refused:
        rule, fix = self.unanswered
        return refuse(rule, "launcher.engine", str(error), fix)

    def status(self, handle: Handle, within_s: float = 0.0) -> Status:
        """Ask the cluster from time to time; whether an ended job succeeded is read from the run directory.

        Raises:
            TrainingFailed: `cluster_silent`, when there was no answer and no sign of life for too long.
        """
        time.sleep(min(within_s, 1.0))
        now = time.monotonic()
        if self._last is not None and (self._last.ended or now < self._ask_at):
            return self._last
        self._ask_at = now + self._ask_every_s
        before = self._last or Status(state="QUEUED", attempt=self._present(handle))
        try:
            self._job = self._ask(handle)
            self._silence.broken()
        except Unanswered as error:
            self._last = self._unheard(handle, before, str(error))
            return self._last
        found = self._judge(handle)
        if not found.ended or found.state == "SUCCEEDED":
            self._ended_at = None
        else:
            self._ended_at = self._ended_at or now
            late = self._job is not None and self._job.state == self.done
            if now - self._ended_at < (LATE_S if late else SETTLE_S):
                self._ask_at = now
                return before
        self._last = found
        return found

    def _unheard(self, handle: Handle, before: Status, why: str) -> Status:
        """Say how the run is as far as its directory shows that."""
        attempt = handle.paths.attempt(number := self._present(handle))
        if done(attempt):
            return Status(state="SUCCEEDED", reason=why, attempt=number)
        silent_s = self._silence.seconds(attempt, time.monotonic())
        if silent_s > self._silence_s:
            raise given_up(
                f"{self.title} job {handle.job}", why, silent_s, self.unanswered[1], handle.run_dir
            )
        return before.model_copy(update={"reason": why, "attempt": number})

    def _judge(self, handle: Handle) -> Status:
        number, job = self._present(handle), self._job
        if job is not None and job.here in ("QUEUED", "RUNNING"):
            return Status(state=job.here, reason=job.reason, attempt=number)
        if finished(handle.paths.attempt(number)):
            return Status(state="SUCCEEDED", reason=job.state if job else "", attempt=number)
        if job is None:
            return Status(state="LOST", reason=f"{self.title} knows no job {handle.job}", attempt=number)
        return Status(state=job.here or "LOST", reason=job.text, attempt=number)

    def logs(self, handle: Handle, count: int = 40) -> Sequence[LogLine]:
        """Return the last lines of the job itself and of everything that ran in it."""
        job = [LogLine(self.name, text) for text in self._said(handle, count)]
        return [*job, *read_logs(handle.paths.attempt(self._present(handle)), count)]

    def cancel(self, handle: Handle, reason: str) -> dict[str, Any]:
        """Cancel the job if it is asked to, wait for its end, and put the hosts' receipts together."""
        if self._receipt is not None:
            return self._receipt
        if reason and not self._until_cancelled(handle):
            reason += f"; {self.title} did not say that job {handle.job} has ended"
        attempt = handle.paths.attempt(self._present(handle))
        receipt = collect_receipts(attempt) or self._receipt_without_hosts(handle)
        if not reason and self._job is not None and self._job.state == self.cancelled:
            reason = f"somebody cancelled {self.title} job {handle.job}"
        if reason and not finished(attempt):
            # The hosts saw a signal of the cluster and cannot know whose wish it was.
            receipt |= {"reason": "stopped", "detail": reason, "scheduler": None}
        self._receipt = receipt
        for config in handle.paths.temp.glob("*config*.json"):  # a host that went away could not
            config.unlink(missing_ok=True)
        attempt.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(attempt.receipt, receipt)
        return receipt

    def _until_cancelled(self, handle: Handle) -> bool:
        """Cancel and wait until nothing runs; returns whether the cluster said that."""
        end = time.monotonic() + self.end_s
        told = False
        while time.monotonic() < end:
            with contextlib.suppress(Unanswered):
                told = told or self._cancel(handle)
                self._job = self._ask(handle)
                if not alive(self._job):
                    return True
            time.sleep(0.5)
        return False

    def _receipt_without_hosts(self, handle: Handle) -> dict[str, Any]:
        """Say how a job ended whose hosts wrote nothing: it never began, or the host went away."""
        job = self._job
        state = job.state if job is not None else ""
        reason = self.ends.get(state, "node_lost" if job is None else "supervisor_died")
        words = (
            f"{self.title} says {job.text} of job {handle.job}"
            if job
            else f"{self.title} knows no job {handle.job}"
        )
        detail = "\n".join(filter(None, [words, *self._said(handle, 5)]))
        return new_receipt(handle.run_id) | {
            "reason": reason,
            "detail": detail,
            "exit_code": None,
            "stop_time": time.time(),
            "scheduler": self.name,
            "survivors": [],
        }

    def _present(self, handle: Handle) -> int:
        """Return the attempt that the job is in: it writes the launch plan anew when it is started again."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self._number = int(parse_json(handle.paths.launch.read_text())["attempt"])
        return self._number

    def _file(self, paths: RunPaths) -> Path:
        return paths.root / f"{self.name}.json"

    def _keep(self, paths: RunPaths, job: str) -> Handle:
        handle = Handle(engine=self.name, run_id=paths.root.name, run_dir=str(paths.root), job=job)
        write_json(self._file(paths), handle.model_dump())
        return handle

    def _kept(self, paths: RunPaths) -> Handle | None:
        try:
            return Handle.model_validate_json(self._file(paths).read_bytes())
        except (OSError, ValidationError):
            return None
