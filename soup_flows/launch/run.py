"""The flow's side of a launch: start the supervisor, wait for it, pass on what ranks say, leave nothing."""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soup_flows.launch import layout, proc
from soup_flows.launch.events import last_lines
from soup_flows.launch.plan import PACKAGE_ROOT, LaunchPlan
from soup_flows.launch.receipt import read_receipt, remove_temporary
from soup_flows.launch.ship import OnEvents, OnLines, Tailer
from soup_flows.launch.supervisor import STOP_SIGNALS, TIDYING_S, UNKILLABLE_S
from soup_flows.lent import run_environment
from soup_flows.paths import write_json

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from soup_flows.launch.supervisor import main; main()"


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, as the supervisor saw it.

    `reason` is `exited` (the launcher ended by itself), `stopped` (asked to, `receipt["detail"]` says why),
    `signal`, `holder_gone`, `timeout`, `stalled`, `rank_died`, or `supervisor_died`.
    """

    exit_code: int | None
    """The launcher's exit code, negative for a signal; None if nobody saw it."""
    reason: str
    receipt: dict[str, Any]
    seconds: float


def run(
    plan: LaunchPlan,
    *,
    on_lines: OnLines | None = None,
    on_events: OnEvents | None = None,
    should_stop: Callable[[], str | None] | None = None,
    lease_fds: Sequence[int] = (),
    poll_s: float = 0.5,
) -> Outcome:
    """Run one attempt to its end and return how it ended; nothing of it is left, whatever happens.

    Args:
        plan: what to start.
        on_lines: called with batches of rank 0's log lines, sampled under load. Runs in a thread of its own
            with this call's context variables; it may block for as long as it likes without slowing the
            ranks.
        on_events: the same for batches of events of all ranks; none is left out.
        should_stop: asked about once a second in the calling thread; a text stops the attempt and is the
            reason. It should answer at once and not raise: let a thread of its own ask a server.
        lease_fds: locks that the supervisor holds too, so that they outlive this process until all is clean.
        poll_s: seconds between two looks at the files.

    Raises:
        OSError: if the supervisor cannot be started.
        BaseException: whatever is raised in the calling thread while it waits (a termination signal, a
            timeout of the task, Ctrl-C), after everything has been stopped within the stop budget.
    """
    begun = time.monotonic()
    sweep(plan.run_id)
    attempt = plan.attempt_paths
    attempt.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    channel = Path(tempfile.mkdtemp(prefix=proc.channel_prefix(plan.run_id)))
    tailer = Tailer(plan, on_lines, on_events, poll_s)
    supervisor: subprocess.Popen[bytes] | None = None
    try:
        supervisor = _start(plan, channel, lease_fds)
        tailer.start()
        _wait(supervisor, should_stop)
    except BaseException as error:
        if supervisor is not None:
            _close_lease(supervisor, f"interrupted by {type(error).__name__}")
        raise
    finally:
        receipt = _end(plan, supervisor, channel)
        tailer.finish()
    return Outcome(receipt["exit_code"], receipt["reason"], receipt, time.monotonic() - begun)


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
    log_fd = os.open(layout.supervisor_log(attempt), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
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


def _wait(supervisor: subprocess.Popen[bytes], should_stop: Callable[[], str | None] | None) -> None:
    """Wait for the supervisor; wakes each second so that what is raised in this thread gets through."""
    asked = False
    while not _ended(supervisor, 1.0):
        reason = should_stop() if should_stop is not None and not asked else None
        if reason is not None:
            asked = True
            _close_lease(supervisor, reason)


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
    said = last_lines(layout.supervisor_log(plan.attempt_paths.root), 5)
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
        write_json(plan.attempt_paths.receipt, receipt)
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
