"""The engine `ray`: one submitted job for a run, on machines that share the run directory.

The flow speaks HTTP with the cluster's dashboard and needs no Ray. The job's entry (`soup_flows.ray_job`) reserves
one place on each machine and starts this package's supervisor there, with torch elastic below it, as on a single
machine; see docs/multi-node.md for why not Ray Train.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from soup_flows.errors import Problem, Refused, refuse
from soup_flows.launch.engines import Handle
from soup_flows.launch.engines.cluster import ASK_EVERY_S, SILENCE_S, ClusterEngine, Unanswered, alive
from soup_flows.launch.engines.ray_http import (
    MODE,
    TOKEN,
    Dashboard,
    Denied,
    RayJob,
    why_infeasible,
)
from soup_flows.launch.plan import PASSED_BY_VALUE, LaunchPlan
from soup_flows.lent import run_environment
from soup_flows.paths import RunPaths
from soup_flows.ray_settings import RaySettings

WAITS = "ray-waits"
"""File below the run's `tmp` that says for what the entry waits, while it does."""
JOB_PROGRAM = "soup_flows.ray_job"
"""What the job runs; it is named and not imported, since it comes after this package and imports Ray."""
OF_THE_CLUSTER = ("CUDA_HOME", "LD_LIBRARY_PATH", "PATH")
"""Variables that a job of Slurm gets, and that a Ray cluster has of its own."""
STOP_MARGIN_S = 20
"""Seconds beyond the stop budget until Ray kills the entry: the hosts' supervisors need some to be heard."""
RUN, FOLDER = "soup_flows_run", "soup_flows_run_dir"
"""Metadata by which a run's jobs are found."""


class RayEngine(ClusterEngine):
    """Runs the attempt as a job of a Ray cluster; it goes on when the process that submitted it is gone."""

    name = "ray"
    title = "Ray"
    done = "SUCCEEDED"
    cancelled = "STOPPED"
    ends: ClassVar[dict[str, str]] = {"STOPPED": "stopped"}
    end_s = 120.0
    unanswered = (
        "ENGINE004",
        "start the flow where the dashboard can be reached; see `ray status` on the head",
    )

    def __init__(
        self, settings: RaySettings, ask_every_s: float = ASK_EVERY_S, silence_s: float = SILENCE_S
    ) -> None:
        """Find the dashboard; nothing is asked.

        Args:
            settings: where it is.
            ask_every_s: seconds between two questions about the job's state.
            silence_s: as for every cluster.
        """
        super().__init__(ask_every_s, silence_s)
        self._dashboard = Dashboard(settings, run_environment())

    def check(self, launch: LaunchPlan) -> list[Problem]:
        """Compare the request with the machines of the cluster; Ray would wait for ever."""
        if launch.ray.grows:
            return []
        try:
            machines = self._dashboard.machines()
        except Unanswered as error:
            return list(self._silent(error).problems)
        reason = why_infeasible(machines, launch.ray.min_nodes or launch.nodes, per_machine(launch))
        fix = "ask for what `ray status` lists, or set launcher.ray.grows=true for a cluster that grows by itself"
        return [_problem("ENGINE006", f"Ray would wait for ever: {reason}", fix)] if reason else []

    def _start(self, launch: LaunchPlan) -> str:
        mode = (self._dashboard.json("GET", "/api/authentication_mode") or {}).get("authentication_mode")
        request = submission(launch, os.getcwd(), run_environment(), mode)
        name = request["submission_id"]
        for number in range(2, 100):
            code, text = self._dashboard.call("POST", "/api/jobs/", request)
            if code == 200:
                return str(request["submission_id"])
            if "already exists" not in text:
                break
            # `attach` found none alive: this one has ended, such as one that never reached a machine
            request["submission_id"] = f"{name}-{number}"
        if code >= 500:
            raise Unanswered(f"Ray does not take the job at present: {_last_line(text)}")
        raise refuse(
            "ENGINE006", "launcher.ray", f"Ray refused the job: {_last_line(text)}", "correct launcher.ray"
        )

    def _silent(self, error: Unanswered) -> Refused:
        if not isinstance(error, Denied):
            return super()._silent(error)
        return refuse(
            "ENGINE005", "launcher.ray", str(error), f"set {TOKEN} to what `ray get-auth-token` prints"
        )

    def _ask(self, handle: Handle) -> RayJob | None:
        found = self._dashboard.json("GET", f"/api/jobs/{handle.job}")
        if found is None:
            return None
        state = str(found.get("status"))
        waits = waiting(handle.paths) if state == "RUNNING" else ""
        words = _last_line(str(found.get("message") or "")) if state in ("PENDING", "FAILED") else ""
        return RayJob(state, waits or words, bool(waits))

    def _find(self, paths: RunPaths) -> list[str]:
        found = self._dashboard.json("GET", "/api/jobs/", list) or []
        mine = [
            job
            for job in found
            if isinstance(job, dict)
            and isinstance(about := job.get("metadata"), dict)
            and (about.get(RUN), about.get(FOLDER)) == (paths.root.name, str(paths.root))
            and isinstance(job.get("submission_id"), str)
            and alive(RayJob(str(job.get("status"))))
        ]
        return [job["submission_id"] for job in sorted(mine, key=_started)]

    def _cancel(self, handle: Handle) -> bool:
        return self._dashboard.call("POST", f"/api/jobs/{handle.job}/stop")[0] in (200, 404)

    def _said(self, handle: Handle, count: int) -> Sequence[str]:
        try:
            found = self._dashboard.json("GET", f"/api/jobs/{handle.job}/logs")
        except Unanswered as error:
            return [str(error)]
        return str((found or {}).get("logs", "")).splitlines()[-count:]


def _started(job: Mapping[str, Any]) -> float:
    started = job.get("start_time")
    return started if isinstance(started, int | float) else 0.0


def per_machine(launch: LaunchPlan) -> dict[str, float]:
    """Return what is reserved on each machine, by Ray's names; memory in bytes."""
    return launch.ray.wanted(launch.cpus_per_node, launch.nproc_per_node if launch.uses_gpus else 0)


def submission(launch: LaunchPlan, cwd: str, environ: Mapping[str, str], mode: str | None) -> dict[str, Any]:
    """Return the body of the request that submits a launch (`POST /api/jobs/`).

    No secret is in it: the dashboard shows it to everybody.

    Args:
        launch: what to start.
        cwd: folder in which the ranks run, since the spec may hold relative paths.
        environ: the flow's environment, of which some of `PASSED_BY_VALUE` is taken.
        mode: the cluster's RAY_AUTH_MODE, if it tells it.
    """
    values = {
        name: environ[name] for name in PASSED_BY_VALUE if name in environ and name not in OF_THE_CLUSTER
    }
    values |= {name: launch.env[name] for name in ("PYTHONPATH",) if name in launch.env}
    values |= {
        # the entry has the hosts save and stop when it hears SIGTERM (`dashboard/modules/job/job_supervisor.py`)
        "RAY_JOB_STOP_WAIT_TIME_S": str(int(launch.stop_budget_s) + STOP_MARGIN_S),
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if mode:  # else a token file on one of the machines decides (`_private/authentication/`)
        values[MODE] = mode
    python = launch.ray.python or sys.executable
    return {
        "entrypoint": f"cd -- {shlex.quote(cwd)} && exec {shlex.quote(python)} -m {JOB_PROGRAM} "
        f"{shlex.quote(launch.run_dir)}",
        "submission_id": f"{launch.run_id}.{launch.attempt}",
        "metadata": {RUN: launch.run_id, FOLDER: launch.run_dir},
        "runtime_env": {"env_vars": values},
    }


def waiting(paths: RunPaths) -> str:
    """Return for what the job's entry waits; empty if it does not."""
    try:
        return (paths.temp / WAITS).read_text().strip()
    except (OSError, ValueError):
        return ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    return lines[-1][:500] if lines else ""


def _problem(rule: str, message: str, fix: str) -> Problem:
    return Problem(id=rule, severity="error", field="launcher.ray", message=message, fix=fix)
