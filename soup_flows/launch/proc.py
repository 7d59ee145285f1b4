"""Find and signal the processes of a run: by parent links, by an environment marker and by where they print.

Every process of a run inherits `SOUP_FLOWS_RUN=<run id>`; `/proc/<pid>/environ` shows the environment a
process was started with, whatever it did about sessions, groups and parents since (`man 5 proc`). A helper
that was started with an empty environment, or that wrote its title over it, still prints into its rank's FIFO.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable

MARKER = "SOUP_FLOWS_RUN"
SUPERVISOR_MARKER = "SOUP_FLOWS_SUPERVISOR"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


_TIDYING = (b"resource_tracker", b"torch_shm_manager")


def prctl(option: int, value: int) -> bool:
    """Call `prctl(option, value)`; False where the kernel, or the filter of a container, refuses."""
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def _pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal()]


def parent_of(pid: int) -> int | None:
    """Return the parent's PID, or None if the process is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
    except (OSError, IndexError, ValueError):
        return None
    return None if state in (b"Z", b"X") else int(parent)


def ended_with(pid: int) -> int | None:
    """Return how a process ended that its parent has not collected yet: -signal, or an exit code above 0.

    None if it is collected, still runs, ended with 0, or may not be looked at (`man 5 proc`, exit_code).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
        return os.waitstatus_to_exitcode(int(fields[49])) or None if fields[0] == b"Z" else None
    except (OSError, IndexError, ValueError):
        return None


def descendants(root: int) -> list[int]:
    """Return all living descendants of `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        parent = parent_of(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def started_at(pid: int) -> float | None:
    """Return the Unix time at which a process was started, or None if it is gone (`man 5 proc`, starttime)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            ticks = int(file.read().rsplit(b")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + ticks / os.sysconf("SC_CLK_TCK")


def marked(run_id: str, name: str = MARKER, before: float | None = None) -> list[int]:
    """Return every living process but this one that was started with `name=run_id` in its environment.

    For the run's own marker also those whose stdout or stderr is a FIFO of the run.

    Args:
        run_id: the marker's value.
        name: the marker.
        before: Unix time; later processes belong to another start of the run and are left out.
    """
    needle = f"{name}={run_id}".encode()
    channel = f"/{channel_prefix(run_id)}" if name == MARKER else None
    found = []
    for pid in _pids():
        mine = needle in _read(f"/proc/{pid}/environ").split(b"\0")
        if not mine and channel is not None:
            mine = any(channel in _link(f"/proc/{pid}/fd/{fd}") for fd in (1, 2))
        if mine and before is not None and (started_at(pid) or 0.0) >= before:
            continue
        if mine and pid != os.getpid() and parent_of(pid) is not None:
            found.append(pid)
    return found


def channel_prefix(run_id: str) -> str:
    """Return how the name of the run's channel folder begins; see `soup_flows.launch.layout`."""
    return f"soup-flows-{run_id}@"


def tidies_up(pid: int) -> bool:
    """Return whether `pid` removes the shared memory of others once these are gone, and then ends by itself.

    These are Python's resource tracker (multiprocessing/resource_tracker.py) and torch's `torch_shm_manager`
    (torch/lib/libshm/manager.cpp). Killed with the rest they would leave `/dev/shm` full.
    """
    command = _read(f"/proc/{pid}/cmdline")
    return any(word in command for word in _TIDYING)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def send(pids: Iterable[int], number: int) -> list[int]:
    """Send a signal to each of `pids` and return those that were there to get it."""
    told = []
    for pid in pids:
        try:
            os.kill(pid, number)
            told.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return told


def pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when `pid` ends; -1 if it has ended, or before Linux 5.3."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def spawn(argv: list[str], environment: dict[str, str], output: int) -> int:
    """Start `argv` in a session of its own, with stdout and stderr to `output`, and return its PID.

    The kernel kills it when the calling thread dies (`man 2 PR_SET_PDEATHSIG`). Signals have their defaults.
    A command that cannot be started ends with exit code 127 and says so on `output`.
    """
    me = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:
            os._exit(1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execvpe(argv[0], argv, environment)  # noqa: S606
    except BaseException as error:
        os.write(output, f"cannot start {argv[0]}: {error}\n".encode())
    os._exit(127)


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9 and so on; unknown numbers as `signal N`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def scheduler() -> str | None:
    """Name the scheduler that may take this machine away by SIGTERM, as its variables show; else None."""
    known = (("slurm", "SLURM_JOB_ID"), ("kubernetes", "KUBERNETES_SERVICE_HOST"))
    return next((name for name, key in known if key in os.environ), None)


def peak_bytes() -> int | None:
    """Return the most memory that this process has held (`VmHWM`, `man 5 proc`), None if unreadable."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def oom_kills() -> int | None:
    """Return how many processes the kernel killed for memory in this process's cgroup, None if unreadable.

    Reads `oom_kill` of `memory.events` (cgroup v2) or `memory.oom_control` (v1); both are described in the
    kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = [line.strip().split(":", 2) for line in file]
    except OSError:
        return None
    places = []
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            places += [
                f"/sys/fs/cgroup/memory{path}/memory.oom_control",
                "/sys/fs/cgroup/memory/memory.oom_control",
            ]
        elif not controllers:
            places += [f"/sys/fs/cgroup{path}/memory.events", "/sys/fs/cgroup/memory.events"]
    for place in places:
        try:
            with open(place, encoding="utf-8") as file:
                for line in file:
                    key, _, value = line.partition(" ")
                    if key == "oom_kill":
                        return int(value)
        except (OSError, ValueError):
            continue
    return None
