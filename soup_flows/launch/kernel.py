"""What the kernel's log says about processes it killed, where it may be read. Standard library."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

_TELLING = re.compile(
    r"out of memory|oom-kill|oom_reaper|killed process|nvrm: xid|segfault at", re.IGNORECASE
)
_KILLED = re.compile(r"killed process (\d+) \(([^)]*)\)", re.IGNORECASE)  # linux, mm/oom_kill.c
KEPT_LINES = 20


def kernel_lines(since: float) -> list[str]:
    """Return the last telling lines of the kernel's log that are newer than `since`.

    Reads `/dev/kmsg` (Documentation/ABI/testing/dev-kmsg); without the right to, the answer is empty.

    Args:
        since: monotonic time in seconds; the log's clock is the same but for the time a machine slept.
    """
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    found: list[str] = []
    try:
        while True:
            try:
                head, _, text = os.read(fd, 8192).decode("utf-8", "replace").partition(";")
            except BrokenPipeError:  # records were overwritten while we read; go on with the next one
                continue
            if float(head.split(",")[2]) / 1e6 >= since - 1.0 and _TELLING.search(text):
                found.append(text.splitlines()[0])
    except (OSError, IndexError, ValueError):
        return found[-KEPT_LINES:]
    finally:
        os.close(fd)


def memory_kill(lines: Sequence[str], pids: Iterable[int | None]) -> str | None:
    """Return the line that says one of `pids` was killed for memory, or None.

    In a container the log has the host's PIDs, so a kill of another PID is not taken for ours.
    """
    wanted = {str(pid) for pid in pids if pid is not None}
    for line in lines:
        killed = _KILLED.search(line)
        if killed and killed.group(1) in wanted and "memory" in line.lower():
            return line
    return None
