"""How long a flow waits for a cluster that does not answer: as long as the run directory shows signs of life."""

from __future__ import annotations

import contextlib

from soup_flows.errors import TrainingFailed
from soup_flows.launch.advice import ADVICE
from soup_flows.launch.engines import finished
from soup_flows.paths import AttemptPaths

SHORT_S = 60.0
"""Longest wait where nothing can be seen of the run meanwhile, such as for the answer whether its job still lives."""


class Silence:
    """For how long a cluster has not answered, counted from the run's own last sign of life."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._sign = 0

    def broken(self) -> None:
        """Forget what was: the cluster has answered."""
        self._since = None

    def seconds(self, attempt: AttemptPaths, now: float) -> float:
        """Return for how many seconds there has been neither an answer nor a sign of life.

        Args:
            attempt: the attempt that the job is in.
            now: monotonic time in seconds.
        """
        sign = last_sign(attempt)
        if self._since is None or sign != self._sign:
            self._since, self._sign = now, sign
        return now - self._since


def given_up(job: str, why: str, silent_s: float, fix: str, run_dir: str) -> TrainingFailed:
    """Return the end of a flow that waits no longer for a job, such as `Ray job run-1.1`."""
    cause = f"{why}, for {silent_s:.0f} s in which the run directory showed no sign of life either"
    words = f"{cause}; {job} may still be there"
    return TrainingFailed("cluster_silent", words, f"{ADVICE['cluster_silent']} {fix}", run_dir)


def last_sign(attempt: AttemptPaths) -> int:
    """Return when ranks or supervisors last wrote into an attempt's folder, in ns by the file server's clock."""
    found = 0
    for path in (attempt.events, attempt.receipt, *attempt.root.glob("heartbeat/*")):
        with contextlib.suppress(OSError):
            found = max(found, path.stat().st_mtime_ns)
    return found


def done(attempt: AttemptPaths) -> bool:
    """Whether an attempt has finished and its supervisor too, which then needs no word of the cluster."""
    return finished(attempt) and attempt.receipt.exists()
