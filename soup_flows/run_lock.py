"""One run directory, one runner: a second one with the same run id would end the first one's ranks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from soup_flows.errors import refuse
from soup_flows.json_text import parse_json
from soup_flows.launch.leases import release
from soup_flows.paths import RunPaths, is_writable_folder, nearest_existing
from soup_flows.user_file import expanded

POLL_S = 0.2
_held: dict[str, int] = {}
"""Locks of this process by their file, so that a task inside a flow that holds the lock does not wait for it."""


@contextlib.contextmanager
def run_lock(paths: RunPaths, wait_s: float) -> Iterator[int]:
    """Hold the run, and make its directory; inside a holder of the same process nothing more is taken.

    The lock is a kernel file lock (`man 2 flock`) on `lock` in the run directory: it is freed by the death of its
    holders. Give the descriptor to the supervisor, so that it lasts until nothing of an attempt is left.

    Args:
        paths: the run's files.
        wait_s: seconds to wait for another holder, which may be cleaning up.

    Yields:
        The descriptor.

    Raises:
        Refused: `RUN001` if another process keeps it, `RUN002` if the directory cannot be written.
    """
    name = str(paths.root / "lock")
    if name in _held:
        yield _held[name]
        return
    fd = _take(name, paths, wait_s)
    while not _is_at(fd, name):  # the holder that was waited for has removed it
        os.close(fd)
        fd = _take(name, paths, wait_s)
    _held[name] = fd
    try:
        yield fd
    finally:
        del _held[name]
        if not paths.launch.exists():  # nothing was ever started here: a refused run leaves its report alone
            Path(name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # and one whose work was finished already leaves nothing
                paths.root.rmdir()
        release([fd])


def _take(name: str, paths: RunPaths, wait_s: float) -> int:
    try:
        paths.create()
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"{paths.root} cannot be written: {error.strerror}"
        raise refuse("RUN002", "output_dir", message, "give a folder that this user can write") from None
    try:
        _wait(fd, paths, wait_s)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_at(fd: int, name: str) -> bool:
    """Whether the open file is the one with this name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(name))
    except OSError:
        return False


def _wait(fd: int, paths: RunPaths, wait_s: float) -> None:
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(POLL_S)
                continue
            raise refuse(
                "RUN001",
                "run_id",
                f"the run {paths.root.name} is being run by {_holder(fd)}",
                f"wait for its end, or end it with soup-flows stop {paths.root}",
            ) from None
        except OSError:  # a file system without locks: nothing can be known
            return
        text = json.dumps({"pid": os.getpid(), "host": platform.node(), "since": time.time()})
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode(), 0)
        return


def _holder(fd: int) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        value = parse_json(os.pread(fd, 4096, 0))
        return f"process {value['pid']} on {value['host']}"
    return "another process"


def check_can_be_made(folder: str | Path) -> None:
    """Say early that a folder cannot be made or written; nothing is made.

    Raises:
        Refused: `RUN002`.
    """
    place = nearest_existing(expanded(folder).absolute())
    if is_writable_folder(place):
        return
    why = f"{place} is not writable" if place.is_dir() else f"{place} is no folder"
    fix = "give a folder that this user can write"
    raise refuse("RUN002", "output_dir", f"{str(folder)!r} cannot be written: {why}", fix)
