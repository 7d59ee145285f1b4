"""The engine `slurm`: one batch job for a run, on machines that share the run directory.

The text of the job is ours and there is no Python dependency: `sbatch`, `squeue`, `scontrol`, `scancel`, and
`sacct` where it answers (22.05 without slurmdbd: "Slurm accounting storage is disabled"). A job that Slurm
starts again (preempted, a host lost, the time limit near) goes on from the run's own newest good checkpoint;
see `soup_flows.slurm_job` for what happens inside it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar

from soup_flows.errors import Problem, refuse
from soup_flows.launch.engines import Handle
from soup_flows.launch.engines.cluster import ClusterEngine, Unanswered, alive
from soup_flows.launch.engines.slurm_commands import ANSWER_S, KILL_WAIT_S, ask, call, settled
from soup_flows.launch.engines.slurm_text import LOG, SCRIPT, Job, batch_script, first_line, parse_squeue
from soup_flows.launch.events import last_lines
from soup_flows.launch.plan import LaunchPlan
from soup_flows.lent import run_environment
from soup_flows.paths import RunPaths, write_atomic


class SlurmEngine(ClusterEngine):
    """Runs the attempt as a Slurm job; it goes on when the process that submitted it is gone."""

    name = "slurm"
    title = "Slurm"
    done = "COMPLETED"
    cancelled = "CANCELLED"
    ends: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("TIMEOUT", "DEADLINE"), "timeout"),
        **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL"), "node_lost"),
        "PREEMPTED": "preempted",
        "OUT_OF_MEMORY": "host_oom",
        "CANCELLED": "stopped",
    }
    end_s = ANSWER_S + KILL_WAIT_S
    unanswered = ("ENGINE002", "see `scontrol ping`")

    def check(self, launch: LaunchPlan) -> list[Problem]:
        """Ask Slurm whether it would ever start the job (`sbatch --test-only`)."""
        try:
            done = call("sbatch", "--test-only", text=_script(launch))
        except Unanswered as error:
            return [_problem("ENGINE002", str(error), "submit on a machine that has Slurm's commands")]
        if done.returncode == 0:
            return []
        words = f"Slurm would never start this job: {first_line(done.stderr)}"
        return [_problem("ENGINE003", words, "ask for what `sinfo` lists, or name another partition")]

    def _start(self, launch: LaunchPlan) -> str:
        script = write_atomic(launch.paths.root / SCRIPT, _script(launch))
        done = call("sbatch", "--parsable", str(script))
        job = done.stdout.strip().split(";")[0]
        if done.returncode != 0 or not job.isdecimal():
            words = f"Slurm refused the job: {first_line(done.stderr or done.stdout)}"
            raise refuse(
                "ENGINE003", "launcher.slurm", words, "correct launcher.slurm; `sinfo` lists what there is"
            )
        return job

    def _ask(self, handle: Handle) -> Job | None:
        return ask(handle.job)

    def _ask_again(self, handle: Handle) -> Job | None:
        return settled(handle.job)

    def _find(self, paths: RunPaths) -> list[str]:
        done = call("squeue", "--noheader", "--me", f"--name={paths.root.name}", "--format=%i|%T")
        found = {job: settled(job) for job in parse_squeue(done.stdout)}
        return [job for job, now in found.items() if alive(now)]

    def _cancel(self, handle: Handle) -> bool:
        return call("scancel", handle.job).returncode == 0

    def _said(self, handle: Handle, count: int) -> Sequence[str]:
        return last_lines(handle.paths.root / LOG, count)


def _script(launch: LaunchPlan) -> str:
    return batch_script(launch, os.getcwd(), run_environment())


def _problem(rule: str, message: str, fix: str) -> Problem:
    return Problem(id=rule, severity="error", field="launcher.slurm", message=message, fix=fix)
