"""The flow's side of a launch: submit to an engine, wait, pass on what ranks say, leave nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from soup_flows.errors import ClusterSilent, Refused
from soup_flows.launch.engines import Engine, Handle, Status, finished
from soup_flows.launch.engines.local import LocalEngine
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.ship import OnEvents, OnLines, Tailer

OnStatus = Callable[[Status], None]


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, as the supervisor saw it.

    `reason` is `exited` (the launcher ended by itself), `stopped` (asked to, `receipt["detail"]` says why),
    `signal`, `holder_gone`, `timeout`, `stalled`, `rank_died`, or `supervisor_died`. A cluster adds `preempted`,
    `node_lost` and `host_oom`.
    """

    exit_code: int | None
    """The launcher's exit code, negative for a signal; None if nobody saw it."""
    reason: str
    receipt: dict[str, Any]
    seconds: float
    attempt: int
    """Number of the attempt that ended; an engine may have begun more than the one that was submitted."""


def run(
    plan: LaunchPlan,
    *,
    on_lines: OnLines | None = None,
    on_events: OnEvents | None = None,
    should_stop: Callable[[], str | None] | None = None,
    lease_fds: Sequence[int] = (),
    poll_s: float = 0.5,
) -> Outcome:
    """Run one attempt on this machine to its end; nothing of it is left, whatever happens.

    See `follow`; `lease_fds` are locks that the supervisor holds too, so that they outlive this process until
    all is clean.
    """
    return follow(
        LocalEngine(lease_fds),
        plan,
        on_lines=on_lines,
        on_events=on_events,
        should_stop=should_stop,
        poll_s=poll_s,
    )


def follow(
    engine: Engine,
    plan: LaunchPlan,
    *,
    on_lines: OnLines | None = None,
    on_events: OnEvents | None = None,
    on_status: OnStatus | None = None,
    should_stop: Callable[[], str | None] | None = None,
    poll_s: float = 0.5,
) -> Outcome:
    """Submit an attempt, or attach to it, and return how it ended; nothing of it is left, whatever happens.

    Args:
        engine: where it runs.
        plan: what to start.
        on_lines: called with batches of rank 0's log lines, sampled under load. Runs in a thread of its own
            with this call's context variables; it may block for as long as it likes without slowing the
            ranks.
        on_events: the same for batches of events of all ranks; none is left out.
        on_status: called in the calling thread when the engine's word about the run changes.
        should_stop: asked about once a second in the calling thread; a text stops the attempt and is the
            reason. It should answer at once and not raise: let a thread of its own ask a server.
        poll_s: seconds between two looks at the files.

    Raises:
        Refused: if the engine cannot run it.
        ClusterSilent: if it has not answered for too long; its job is left alone.
        OSError: if the supervisor cannot be started.
        BaseException: whatever is raised in the calling thread while it waits (a termination signal, a
            timeout of the task, Ctrl-C), after everything has been stopped within the stop budget.
    """
    begun = time.monotonic()
    known = finished(plan.attempt_paths) or engine.attach(plan.paths) is not None
    problems = [] if known else engine.check(plan)
    if problems:
        raise Refused(problems)
    wait = _Wait(engine, plan, on_lines, on_events, on_status, poll_s)
    try:
        reason = wait.until_ended(should_stop)
    except ClusterSilent:
        wait.leave()
        raise
    except BaseException as error:
        wait.end(f"interrupted by {type(error).__name__}")
        raise
    receipt = wait.end(reason)
    return Outcome(
        receipt["exit_code"], receipt["reason"], receipt, time.monotonic() - begun, wait.plan.attempt
    )


class _Wait:
    """A submitted attempt and the thread that passes on what it says; the next attempt gets its own."""

    def __init__(
        self,
        engine: Engine,
        plan: LaunchPlan,
        on_lines: OnLines | None,
        on_events: OnEvents | None,
        on_status: OnStatus | None,
        poll_s: float,
    ) -> None:
        self.engine, self.plan = engine, plan
        self._on_lines, self._on_events, self._poll_s = on_lines, on_events, poll_s
        self._on_status = on_status
        self._said: Status | None = None
        self._handle: Handle | None = None
        self._tailer = self._new_tailer()

    def _new_tailer(self) -> Tailer:
        return Tailer(self.plan, self._on_lines, self._on_events, self._poll_s)

    def until_ended(self, should_stop: Callable[[], str | None] | None) -> str:
        """Wait; returns early with the reason when asked to stop, and wakes each second for what is raised."""
        self._handle = self.engine.submit(self.plan)
        self._tailer.start()
        while not self._look(self.engine.status(self._handle, 1.0)):
            reason = should_stop() if should_stop is not None else None
            if reason is not None:
                self.engine.cancel(self._handle, reason)
                return reason
        return ""

    def _look(self, status: Status) -> bool:
        """Tell what is new; returns whether the run has ended."""
        if status.attempt != self.plan.attempt:  # the engine has begun another one by itself
            self._tailer.finish()
            self.plan = self.plan.model_copy(update={"attempt": status.attempt})
            self._tailer = self._new_tailer()
            self._tailer.start()
        if status != self._said and self._on_status is not None:
            self._on_status(status)
        self._said = status
        return status.ended

    def leave(self) -> None:
        """Wait no longer for a job that may go on."""
        self._tailer.finish()

    def end(self, reason: str) -> dict[str, Any]:
        """End what is left and return the receipt; empty for what was never submitted."""
        handle = self._handle or self.engine.attach(self.plan.paths)
        receipt = self.engine.cancel(handle, reason) if handle is not None else {}
        self._tailer.finish()
        return receipt
