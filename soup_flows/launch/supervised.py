"""The supervisor as its starter sees it: started, asked to stop, waited for; and the sweep of what has none."""

from __future__ import annotations

import contextlib
import glob
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soup_flows.launch import layout, proc
from soup_flows.launch.events import last_lines
from soup_flows.launch.plan import PACKAGE_ROOT, LaunchPlan
from soup_flows.launch.receipt import read_receipt, remove_temporary
from soup_flows.launch.supervisor import STOP_SIGNALS, TIDYING_S, UNKILLABLE_S
from soup_flows.lent import run_environment
from soup_flows.paths import write_json

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from soup_flows.launch.supervisor import main; main()"


class Supervised:
    """One attempt on this host: its supervisor, from the start to the receipt."""

    def __init__(self, plan: LaunchPlan, lease_fds: Sequence[int] = ()) -> None:
        self.plan = plan
        self._lease_fds = lease_fds
        self._process: subprocess.Popen[bytes] | None = None
        self._channel = Path()
        self._receipt: dict[str, Any] | None = None

    @property
    def started(self) -> bool:
        """Whether there is, or was, a supervisor."""
        return self._process is not None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The supervisor, once it was started."""
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """End what is left of the run on this host, then start the supervisor.

        Raises:
            OSError: if it cannot be started.
        """
        sweep(self.plan.run_id)
        self.plan.attempt_paths.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._channel = Path(tempfile.mkdtemp(prefix=proc.channel_prefix(self.plan.run_id)))
        try:
            self._process = _start(self.plan, self._channel, self._lease_fds)
        except BaseException:
            self.finish()
            raise

    def ended(self, within_s: float) -> bool:
        """Return whether the supervisor has ended, waiting at most `within_s` seconds; it is not reaped."""
        return _ended(self.process, within_s)

    def ask(self, reason: str) -> None:
        """Ask the supervisor to stop everything; only the first reason counts."""
        _close_lease(self.process, reason)

    def finish(self) -> dict[str, Any]:
        """Wait within the budget for the supervisor, sweep what a dead one left, and return the receipt."""
        if self._receipt is None:
            self._receipt = _end(self.plan, self._process, self._channel)
        return self._receipt


def _start(plan: LaunchPlan, channel: Path, lease_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    attempt = plan.attempt_paths.root
    spec = {
        "run_id": plan.run_id,
        "attempt_dir": str(attempt),
        "channel": str(channel),
        "holder_pid": os.getpid(),
        "lease_fds": list(lease_fds),
        **plan.model_dump(
            mode="json",
            include={
                "nproc_per_node",
                "nodes",
                "node",
                "argv",
                "stop_budget_s",
                "timeout_s",
                "stall",
                "config_path",
                "log_limit_bytes",
            },
        ),
    }
    spec_path = write_json(channel / "supervisor.json", spec)
    variables = plan.environment(run_environment())
    variables |= {layout.CHANNEL: str(channel), proc.SUPERVISOR_MARKER: plan.run_id}
    log_fd = os.open(layout.supervisor_log(attempt, plan.node), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    # Inherited as blocked: a stop signal waits until the supervisor is ready for it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, PACKAGE_ROOT, str(spec_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_fd,
            env=variables,
            bufsize=0,
            pass_fds=lease_fds,
        )
    finally:
        os.close(log_fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _ended(supervisor: subprocess.Popen[bytes], within_s: float) -> bool:
    """Return whether the supervisor has ended, waiting at most `within_s` seconds; it is not reaped."""
    if supervisor.returncode is not None:
        return True
    pidfd = proc.pidfd(supervisor.pid)
    if pidfd < 0:
        return _ended_by_polling(supervisor.pid, within_s)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(1000 * within_s))
    finally:
        os.close(pidfd)


def _ended_by_polling(pid: int, within_s: float) -> bool:
    """The same where the kernel, or a container's filter, has no `pidfd_open`."""
    end = time.monotonic() + within_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _close_lease(supervisor: subprocess.Popen[bytes], reason: str) -> None:
    """Ask the supervisor to stop everything."""
    assert supervisor.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        supervisor.stdin.write(" ".join(reason.split())[:2000].encode() + b"\n")
    with contextlib.suppress(OSError):
        supervisor.stdin.close()


def _end(plan: LaunchPlan, supervisor: subprocess.Popen[bytes] | None, channel: Path) -> dict[str, Any]:
    """Wait within the budget for the supervisor, sweep what a dead one left, and return the receipt."""
    receipt: dict[str, Any] = {}
    if supervisor is not None:
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        with contextlib.suppress(OSError):
            supervisor.stdin.close()
        if not _ended(supervisor, plan.stop_budget_s + UNKILLABLE_S + 2.0):
            supervisor.kill()
        supervisor.wait()
        if not supervisor.stdout.closed:
            os.set_blocking(supervisor.stdout.fileno(), False)
            receipt = read_receipt((supervisor.stdout.read() or b"").decode("utf-8", "replace"))
            supervisor.stdout.close()
    swept = sweep(plan.run_id)
    remove_temporary(channel, plan.config_path)
    if not receipt:
        receipt = _receipt_of_the_dead(plan, supervisor, swept)
    return receipt


def _receipt_of_the_dead(
    plan: LaunchPlan, supervisor: subprocess.Popen[bytes] | None, swept: list[int]
) -> dict[str, Any]:
    code = supervisor.returncode if supervisor is not None else 0
    detail = f"killed by {proc.signal_name(-code)}" if code < 0 else f"exit code {code}"
    said = last_lines(layout.supervisor_log(plan.attempt_paths.root, plan.node), 5)
    receipt = {
        "v": layout.PROTOCOL_VERSION,
        "run_id": plan.run_id,
        "reason": "supervisor_died",
        "detail": "\n".join([f"the supervisor ended without a receipt: {detail}", *said]),
        "exit_code": None,
        "stop_time": time.time(),
        "signalled": [{"pid": pid, "signal": "SIGKILL", "rank": None} for pid in swept],
        "dead_ranks": [],
        "survivors": proc.marked(plan.run_id),
    }
    with contextlib.suppress(OSError):
        write_json(plan.attempt_paths.receipt_of(plan.node), receipt)
    return receipt


def sweep(run_id: str, wait_s: float = 30.0, before: float | None = None) -> list[int]:
    """End every process of run `run_id` on this host, wherever it is in the process tree.

    A living supervisor is asked first and gets `wait_s` seconds, so that the grace it gives the ranks is not
    cut short; then everything that carries the run's marker is killed.

    The folder in which it kept its pipes goes too.

    Args:
        run_id: the run.
        wait_s: seconds that a living supervisor gets.
        before: Unix time; what was started later, by another start of the same run, is left alone.

    Returns:
        The PIDs that were sent SIGKILL.
    """
    end = time.monotonic() + wait_s
    proc.send(proc.marked(run_id, proc.SUPERVISOR_MARKER, before), signal.SIGTERM)
    while proc.marked(run_id, proc.SUPERVISOR_MARKER, before) and time.monotonic() < end:
        time.sleep(0.05)
    killed: set[int] = set()
    begun = time.monotonic()
    while (left := proc.marked(run_id, before=before)) and time.monotonic() < begun + UNKILLABLE_S:
        if time.monotonic() < begun + TIDYING_S:
            left = [pid for pid in left if not proc.tidies_up(pid)]
        killed.update(proc.send(left, signal.SIGKILL))
        time.sleep(0.02)
    if before is not None and proc.marked(run_id):
        return sorted(killed)
    for folder in Path(tempfile.gettempdir()).glob(glob.escape(proc.channel_prefix(run_id)) + "*"):
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            remove_temporary(folder, None)
    return sorted(killed)
