"""The engine `slurm`: one batch job for a run, on machines that share the run directory.

The text of the job is ours and there is no Python dependency: `sbatch`, `squeue`, `scontrol`, `scancel`, and
`sacct` where it answers (22.05 without slurmdbd: "Slurm accounting storage is disabled"). A job that Slurm
starts again (preempted, a host lost, the time limit near) goes on from the run's own newest good checkpoint;
see `soup_flows.slurm_job` for what happens inside it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from soup_flows.errors import Problem, refuse
from soup_flows.json_text import parse_json
from soup_flows.launch.engines import Handle, LogLine, Status, finished, read_logs
from soup_flows.launch.engines.slurm_commands import ANSWER_S, KILL_WAIT_S, Unanswered, alive, ask, call
from soup_flows.launch.engines.slurm_text import (
    HANDLE,
    LOG,
    SCRIPT,
    Job,
    batch_script,
    first_line,
    parse_squeue,
)
from soup_flows.launch.events import last_lines
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.receipt import collect_receipts, new_receipt
from soup_flows.lent import run_environment
from soup_flows.paths import RunPaths, write_atomic, write_json

ASK_EVERY_S = 5.0
"""Seconds between two questions about a job; sites ask for few (`man 1 squeue`, PERFORMANCE)."""
SETTLE_S = 2.0
"""Seconds after which an end is believed, since a job that is started again passes through one."""
LATE_S = 90.0
"""The same for a job that says it finished: NFS may show a new file a minute late (`man 5 nfs`, acdirmax)."""

ENDS_OF_SLURM = {"TIMEOUT": "timeout", "DEADLINE": "timeout", "PREEMPTED": "preempted", "NODE_FAIL": "node_lost",
                 "BOOT_FAIL": "node_lost", "OUT_OF_MEMORY": "host_oom", "CANCELLED": "stopped"}  # fmt: skip
"""Job state to the reason of a receipt, for an attempt that could leave none itself."""


class SlurmEngine:
    """Runs the attempt as a Slurm job; it goes on when the process that submitted it is gone."""

    def __init__(self, ask_every_s: float = ASK_EVERY_S) -> None:
        """Remember nothing; every answer comes from Slurm or from the run directory.

        Args:
            ask_every_s: seconds between two questions about the job's state.
        """
        self._ask_every_s = ask_every_s
        self._ask_at = 0.0
        self._ended_at: float | None = None
        self._last: Status | None = None
        self._job: Job | None = None
        self._receipt: dict[str, Any] | None = None
        self._number = 1

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

    def submit(self, launch: LaunchPlan) -> Handle:
        """Submit the job, unless one of this run is queued or running, or has finished the attempt."""
        running = self.attach(launch.paths)
        if running is None and finished(launch.attempt_paths):  # while nobody waited for it
            running = _kept(launch.paths)
        if running is not None:
            return running
        self._last = self._receipt = self._ended_at = None
        script = write_atomic(launch.paths.root / SCRIPT, _script(launch))
        try:
            done = call("sbatch", "--parsable", str(script))
        except Unanswered as error:
            raise refuse("ENGINE002", "launcher.engine", str(error), "see `scontrol ping`") from None
        job = done.stdout.strip().split(";")[0]
        if done.returncode != 0 or not job.isdecimal():
            words = f"Slurm refused the job: {first_line(done.stderr or done.stdout)}"
            raise refuse(
                "ENGINE003", "launcher.slurm", words, "correct launcher.slurm; `sinfo` lists what there is"
            )
        return self._keep(launch.paths, job)

    def attach(self, paths: RunPaths) -> Handle | None:
        """Find the run's job by the handle in its directory, else by its name, which is the run id.

        Raises:
            Refused: `ENGINE002` if Slurm does not answer: a second job of the run would write into its directory.
        """
        known = _kept(paths)
        try:
            if known is not None and alive(known.job):
                return known
            done = call("squeue", "--noheader", "--me", f"--name={paths.root.name}", "--format=%i|%T")
            found = [job for job in parse_squeue(done.stdout) if alive(job)]
        except Unanswered as error:
            raise refuse("ENGINE002", "launcher.engine", str(error), "see `scontrol ping`") from None
        return self._keep(paths, found[-1]) if found else None

    def status(self, handle: Handle, within_s: float = 0.0) -> Status:
        """Ask Slurm from time to time; whether an ended job succeeded is read from the run directory."""
        time.sleep(min(within_s, 1.0))
        now = time.monotonic()
        if self._last is not None and (self._last.ended or now < self._ask_at):
            return self._last
        self._ask_at = now + self._ask_every_s
        before = self._last or Status(state="QUEUED", attempt=self._present(handle))
        try:
            self._job = ask(handle.job)
        except Unanswered as error:
            return before.model_copy(update={"reason": str(error)})
        found = self._judge(handle)
        if not found.ended or found.state == "SUCCEEDED":
            self._ended_at = None
        else:
            self._ended_at = self._ended_at or now
            late = self._job is not None and self._job.state == "COMPLETED"
            if now - self._ended_at < (LATE_S if late else SETTLE_S):
                self._ask_at = now
                return before
        self._last = found
        return found

    def _judge(self, handle: Handle) -> Status:
        number, job = self._present(handle), self._job
        if job is not None and job.here in ("QUEUED", "RUNNING"):
            return Status(state=job.here, reason=job.reason, attempt=number)
        if finished(handle.paths.attempt(number)):
            return Status(state="SUCCEEDED", reason=job.state if job else "", attempt=number)
        if job is None:
            return Status(state="LOST", reason=f"Slurm knows no job {handle.job}", attempt=number)
        return Status(state=job.here or "LOST", reason=job.text, attempt=number)

    def logs(self, handle: Handle, count: int = 40) -> Sequence[LogLine]:
        """Return the last lines of the batch script and of everything that ran in the job."""
        batch = [LogLine("slurm", text) for text in last_lines(handle.paths.root / LOG, count)]
        return [*batch, *read_logs(handle.paths.attempt(self._present(handle)), count)]

    def cancel(self, handle: Handle, reason: str) -> dict[str, Any]:
        """Cancel the job if it is asked to, wait for its end, and put the hosts' receipts together."""
        if self._receipt is not None:
            return self._receipt
        if reason:
            self._scancel(handle)
        attempt = handle.paths.attempt(self._present(handle))
        receipt = collect_receipts(attempt) or self._receipt_without_hosts(handle)
        if not reason and self._job is not None and self._job.state == "CANCELLED":
            reason = f"somebody cancelled Slurm job {handle.job}"
        if reason and not finished(attempt):
            # The hosts saw a signal of Slurm and cannot know whose wish it was.
            receipt |= {"reason": "stopped", "detail": reason, "scheduler": None}
        self._receipt = receipt
        for config in handle.paths.temp.glob("*config*.json"):  # a host that went away could not
            config.unlink(missing_ok=True)
        attempt.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(attempt.receipt, receipt)
        return receipt

    def _scancel(self, handle: Handle) -> None:
        """Cancel and wait until nothing runs."""
        end = time.monotonic() + ANSWER_S + KILL_WAIT_S
        told = False
        while time.monotonic() < end:
            try:
                told = told or call("scancel", handle.job).returncode == 0
                self._job = ask(handle.job)
            except Unanswered:
                pass
            else:
                if self._job is None or self._job.here not in ("QUEUED", "RUNNING"):
                    return
            time.sleep(0.5)

    def _receipt_without_hosts(self, handle: Handle) -> dict[str, Any]:
        """Say how a job ended whose hosts wrote nothing: it never began, or the host went away."""
        job = self._job
        said = "\n".join(last_lines(handle.paths.root / LOG, 5))
        state = job.state if job is not None else ""
        reason = ENDS_OF_SLURM.get(state, "node_lost" if job is None else "supervisor_died")
        words = f"Slurm says {job.text} of job {handle.job}" if job else f"Slurm knows no job {handle.job}"
        detail = "\n".join(filter(None, [words, said]))
        return new_receipt(handle.run_id) | {
            "reason": reason,
            "detail": detail,
            "exit_code": None,
            "stop_time": time.time(),
            "scheduler": "slurm",
            "survivors": [],
        }

    def _present(self, handle: Handle) -> int:
        """Return the attempt that the job is in: it writes the launch plan anew when Slurm starts it again."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self._number = int(parse_json(handle.paths.launch.read_text())["attempt"])
        return self._number

    @staticmethod
    def _keep(paths: RunPaths, job: str) -> Handle:
        handle = Handle(engine="slurm", run_id=paths.root.name, run_dir=str(paths.root), job=job)
        write_json(paths.root / HANDLE, handle.model_dump())
        return handle


def _script(launch: LaunchPlan) -> str:
    return batch_script(launch, os.getcwd(), run_environment())


def _problem(rule: str, message: str, fix: str) -> Problem:
    return Problem(id=rule, severity="error", field="launcher.slurm", message=message, fix=fix)


def _kept(paths: RunPaths) -> Handle | None:
    try:
        return Handle.model_validate_json((paths.root / HANDLE).read_bytes())
    except (OSError, ValidationError):
        return None
