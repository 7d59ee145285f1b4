"""Drain pipes into log files: bars collapsed, secrets hidden, files rotated, never a reason for a rank to wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from soup_flows.launch.hide import hidden_bytes

READ_BYTES = 1 << 20
LINE_LIMIT_BYTES = 1 << 20
BAR_EVERY_S = 10.0
F_SETPIPE_SZ = 1031  # linux/fcntl.h


class RotatingLog:
    """An append-only file that moves to `<name>.1` when it reaches `limit_bytes`; one older file is kept.

    A full disk must not stop the ranks: what cannot be written is counted in `lost_bytes` and dropped.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.lost_bytes = 0
        self._size = 0
        self._fd = -1
        self._open()

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._fd).st_size

    def write(self, data: bytes) -> None:
        """Append `data`, rotating first if it would not fit."""
        if self._size and self._size + len(data) > self.limit_bytes:
            self.close()
            with contextlib.suppress(OSError):
                self.path.replace(self.path.with_name(self.path.name + ".1"))
        if self._fd < 0:
            self._open()
        try:
            written = os.write(self._fd, data)
        except OSError:
            written = 0
        self._size += written
        self.lost_bytes += len(data) - written

    def move(self, path: Path) -> None:
        """Give the file another name and go on in it."""
        with contextlib.suppress(OSError):
            self.path.replace(path)
        self.path = path

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size = -1, 0


def _after_return(line: bytes) -> bytes:
    """Return what a terminal would show of `line`: the text after the last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Pump:
    """Reads one non-blocking descriptor and writes whole lines to a `RotatingLog`.

    Of a progress bar only the text after the last carriage return is kept; a bar that is still moving is
    written every ten seconds, so that the log of a stuck run shows where it stood.
    """

    def __init__(self, fd: int, log: RotatingLog) -> None:
        self.fd = fd
        self.log = log
        self._rest = b""
        self._bar_moved = False
        self._bar_time = time.monotonic()
        os.set_blocking(fd, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, F_SETPIPE_SZ, READ_BYTES)

    def drain(self, now: float) -> bytes:
        """Read what is there, up to 1 MiB, and return it. Empty when there is nothing (or nobody) left."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return b""
        if data:
            self._feed(data, now)
        return data

    def _feed(self, data: bytes, now: float) -> None:
        head, newline, rest = (self._rest + data).rpartition(b"\n")
        if newline:
            if b"\r" in head:
                head = b"\n".join(map(_after_return, head.split(b"\n")))
            self._write(head + newline)
            self._bar_moved = False
        if b"\r" in rest:
            self._bar_moved = True
            rest = _after_return(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        if len(rest) > LINE_LIMIT_BYTES:
            self._write(rest + b"\n")
            rest = b""
        self._rest = rest
        self.tick(now)

    def _write(self, lines: bytes) -> None:
        self.log.write(hidden_bytes(lines))

    def tick(self, now: float) -> None:
        """Write a moving bar's present text if the last one was written ten seconds ago."""
        if self._bar_moved and now - self._bar_time >= BAR_EVERY_S:
            self._write(_after_return(self._rest) + b"\n")
            self._bar_moved, self._bar_time = False, now

    def finish(self, now: float) -> None:
        """Write everything that is left and close the log; the descriptor stays open."""
        while self.drain(now):
            pass
        if self._rest:
            self._write(_after_return(self._rest) + b"\n")
            self._rest = b""
        self.log.close()


def make_fifo(path: Path) -> int:
    """Create a FIFO and return a read-write descriptor: no writer blocks on opening it or sees it close."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
