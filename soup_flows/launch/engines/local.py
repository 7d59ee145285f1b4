"""The engine `local`: a supervisor below this process, and torch elastic below that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soup_flows.errors import Problem
from soup_flows.launch.engines import Handle, LogLine, Status, finished, read_logs
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.supervised import Supervised
from soup_flows.paths import RunPaths

ASKED = ("stopped", "signal", "holder_gone", "preempted")
"""Reasons of a receipt that mean somebody ended the run."""


class LocalEngine:
    """Runs the attempt on this machine; it ends with the process that submitted it, however that ends."""

    def __init__(self, lease_fds: Sequence[int] = ()) -> None:
        """Keep the locks that the supervisor holds too, so that they outlive this process until all is clean."""
        self._lease_fds = tuple(lease_fds)
        self._runs: dict[str, Supervised] = {}

    def check(self, launch: LaunchPlan) -> list[Problem]:
        """Refuse a launch over several machines."""
        if launch.nodes == 1 or launch.engine != "local":  # one host of an engine that has several
            return []
        return [
            Problem(
                id="ENGINE001",
                severity="error",
                field="launcher.engine",
                message=f"the engine local has this machine alone, and {launch.nodes} are asked for",
                fix="use launcher.engine=slurm or ray, or one machine",
            )
        ]

    def submit(self, launch: LaunchPlan) -> Handle:
        """Start the supervisor, after everything that an earlier start of the run left has been ended."""
        run = self._runs.get(launch.run_id)
        if run is None or not run.started or run.ended(0.0):
            run = self._runs[launch.run_id] = Supervised(launch, self._lease_fds)
            run.start()
        return self._handle(run)

    def attach(self, paths: RunPaths) -> Handle | None:
        """Return the handle of a run that this object started; no other outlives its flow process."""
        run = next((run for run in self._runs.values() if run.plan.paths == paths), None)
        return None if run is None or not run.started or run.ended(0.0) else self._handle(run)

    def status(self, handle: Handle, within_s: float = 0.0) -> Status:
        """Look at the supervisor, and at the result once that has ended."""
        run = self._runs[handle.run_id]
        number = run.plan.attempt
        if not run.ended(within_s):
            return Status(state="RUNNING", attempt=number)
        if finished(handle.paths.attempt(number)):
            return Status(state="SUCCEEDED", attempt=number)
        receipt = run.finish()
        reason = receipt["reason"]
        words = ": ".join(filter(None, [reason, receipt.get("detail", "")]))
        asked, lost = reason in ASKED, reason == "supervisor_died"
        return Status(
            state="CANCELLED" if asked else "LOST" if lost else "FAILED", reason=words, attempt=number
        )

    def logs(self, handle: Handle, count: int = 40) -> Sequence[LogLine]:
        """Return the last lines of the ranks and of torch elastic."""
        return read_logs(handle.paths.attempt(self._runs[handle.run_id].plan.attempt), count)

    def cancel(self, handle: Handle, reason: str) -> dict[str, Any]:
        """Ask the supervisor to stop, wait within the budget, sweep what a dead one left."""
        run = self._runs[handle.run_id]
        if reason:
            run.ask(reason)
        return run.finish()

    @staticmethod
    def _handle(run: Supervised) -> Handle:
        return Handle(
            engine="local", run_id=run.plan.run_id, run_dir=run.plan.run_dir, job=str(run.process.pid)
        )
