"""What a rank does before anything else, and the files it leaves for the supervisor. Standard library.

```python
from soup_flows.launch import rank
rank.attach()             # first, before torch is imported
rank.heartbeat(step)      # after every step
```
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import logging
import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from soup_flows.launch import layout
from soup_flows.launch.hide import hidden
from soup_flows.launch.proc import PR_SET_PDEATHSIG, prctl
from soup_flows.paths import write_json

EVENT_TEXT_LIMIT = 4000
"""Characters of an error or warning in an event; `errors/` and `logs/` have all of it."""
WARNINGS_LIMIT = 50
"""Different warnings of a rank that become events."""

_stack_file: IO[str] | None = None
_heartbeat_fd: int | None = None


def rank_number() -> int:
    """Return this process's global rank (`RANK`, 0 where it is not set)."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this process's rank on its host (`LOCAL_RANK`, the global rank where it is not set)."""
    return int(os.environ.get("LOCAL_RANK", rank_number()))


def attempt_dir() -> Path | None:
    """Return the attempt's folder, or None when not started by a launcher."""
    value = os.environ.get(layout.ATTEMPT_DIR)
    return Path(value) if value else None


def attach() -> bool:
    """Tie this process to its supervisor; call it first.

    From here on stdout and stderr go to the rank's own log, the process dies with its launcher even when that
    is killed by SIGKILL, and SIGUSR1 writes the stacks of all threads to the attempt's `stacks/rank_<r>.txt`.

    Returns:
        False, with nothing changed, when there is no supervisor.
    """
    channel, attempt = os.environ.get(layout.CHANNEL), attempt_dir()
    if not channel or attempt is None or not Path(channel).is_dir():
        return False
    _die_with_parent(int(os.environ[layout.SUPERVISOR_PID]))
    local = local_rank()
    out = os.open(layout.fifo(Path(channel), local), os.O_WRONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    _register_stacks(layout.stacks(attempt, rank_number()))
    atexit.register(_mark_clean, layout.clean_mark(Path(channel), local))
    pid_file = layout.pid_file(Path(channel), local)
    beside = pid_file.with_suffix(".tmp")
    beside.write_text(f"{os.getpid()} {rank_number()}")
    beside.replace(pid_file)
    return True


def _die_with_parent(supervisor: int) -> None:
    """Ask for SIGKILL when the parent dies; leave at once if it (or the supervisor) is dead already."""
    parent = os.getppid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(supervisor, 0)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:
        os._exit(1)


def _register_stacks(path: Path) -> None:
    global _stack_file
    path.parent.mkdir(parents=True, exist_ok=True)
    _stack_file = path.open("a")  # kept open: the handler writes to its descriptor
    faulthandler.register(signal.SIGUSR1, file=_stack_file, all_threads=True)
    faulthandler.enable(file=2)


def _mark_clean(mark: Path) -> None:
    if getattr(sys, "last_value", None) is None:
        with contextlib.suppress(OSError):
            mark.touch()


def heartbeat(step: int, phase: str = "train") -> None:
    """Tell the watchdog that `step` is done.

    Args:
        step: number of optimizer steps made so far.
        phase: one word; anything but `train` (such as `load`, `evaluate`, `save`) gives all ranks the long
            start-up limit, because the others wait for this one. `end` says that the result is safe.
    """
    global _heartbeat_fd
    attempt = attempt_dir()
    if attempt is None:
        return
    with contextlib.suppress(OSError):  # a full disk must not end the training
        if _heartbeat_fd is None:
            path = layout.heartbeat(attempt, rank_number())
            path.parent.mkdir(parents=True, exist_ok=True)
            _heartbeat_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(_heartbeat_fd, f"{step:<12d}{phase:<16s}\n".encode(), 0)


def _plain(value: Any) -> Any:
    """Return `value` as strict JSON allows it, NaN and infinities as text; secrets in texts are hidden."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (int, float, bool, type(None))) else hidden(str(value))


class EventWriter:
    """Appends structured events to the attempt's `events.jsonl`, one JSON object a line, one write each.

    Several ranks may write to the same file: `O_APPEND` writes of one line do not mix on a local disk, and
    readers skip a torn line. A full disk loses events, never the run.
    """

    def __init__(self, path: str | Path, rank: int) -> None:
        self.rank = rank
        self.lost = 0
        self._torn = False
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, **fields: Any) -> None:
        """Append `{"v": 1, "time": <Unix seconds>, "rank": r, "kind": kind, **fields}`."""
        event = {"v": layout.PROTOCOL_VERSION, "time": time.time(), "rank": self.rank, "kind": kind}
        line = json.dumps({**event, **_plain(fields), **event}, ensure_ascii=False, allow_nan=False)
        data = ("\n" * self._torn + line + "\n").encode("utf-8", "replace")
        try:
            written = os.write(self._fd, data)
        except OSError:
            written = 0
        self.lost += written < len(data)
        self._torn = 0 < written < len(data) or (self._torn and written == 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def write_error(error: BaseException) -> Path | None:
    """Write what ended this rank to the attempt's `errors/rank_<r>.json`, for `soup_flows.launch.outcome`.

    A short form goes out as the event `error`, so that the flow can show it before the attempt has ended.

    The file holds `type`, `types` (the class, its bases and those of its causes), `message`, `traceback`,
    `time` (Unix seconds) and, if the exception carries one, its `failure_class`.

    Returns:
        The file, or None when there is no attempt folder or the disk refuses.
    """
    attempt = attempt_dir()
    if attempt is None:
        return None
    now = time.time()
    types: list[str] = []
    link: BaseException | None = error
    while link is not None and len(types) < 100:
        types += [f"{c.__module__}.{c.__qualname__}" for c in type(link).__mro__ if c is not object]
        link = link.__cause__
    path = layout.error(attempt, rank_number())
    value = {
        "v": layout.PROTOCOL_VERSION,
        "rank": rank_number(),
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "types": types,
        "message": hidden(str(error)),
        "traceback": hidden("".join(traceback.format_exception(error))),
        "time": now,
        "failure_class": getattr(error, "failure_class", None),
        "advice": getattr(error, "advice", None),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)
        events = EventWriter(attempt / "events.jsonl", rank_number())
        text = f"{value['type']}: {error}"[:EVENT_TEXT_LIMIT]
        events.write("error", message=text, traceback=str(value["traceback"])[-EVENT_TEXT_LIMIT:])
        events.close()
    except OSError:
        return None
    return path


def report_warnings(events: EventWriter, loggers: Sequence[str] = ()) -> None:
    """Write each warning of Python and of the named loggers once as an event `warning`; they are shown as before.

    Args:
        events: where to.
        loggers: names of loggers, whose records of level WARNING and above count.
    """
    seen: set[str] = set()

    def write(text: str) -> None:
        text = " ".join(text.split())[:EVENT_TEXT_LIMIT]
        if text not in seen and len(seen) < WARNINGS_LIMIT:
            seen.add(text)
            events.write("warning", message=text)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            write(record.getMessage())

    show = warnings.showwarning

    def show_and_write(message: Warning | str, category: type[Warning], *where: Any, **how: Any) -> None:
        show(message, category, *where, **how)
        write(f"{category.__name__}: {message}")

    warnings.showwarning = show_and_write
    for name in loggers:
        logging.getLogger(name).addHandler(Handler(logging.WARNING))
