"""Read what ranks write while they write it: structured events and log lines. Standard library."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from soup_flows.json_text import parse_object
from soup_flows.launch.layout import PROTOCOL_VERSION

READ_BYTES = 1 << 20
LINE_LIMIT_BYTES = 1 << 20
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")  # ECMA-48


class LineTail:
    """Follows a text file that may not exist yet, be rotated (`<name>.1`) or be truncated.

    Lines come decoded as UTF-8 with replacement characters, without line ends. A line is given out once it is
    complete; `finish()` gives the unfinished rest.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None
        self._rest = b""

    def poll(self, limit_bytes: int = READ_BYTES) -> list[str]:
        """Return the complete lines that are new, of about `limit_bytes`; empty only where nothing is left."""
        if self._file is None and not self._open():
            return []
        lines: list[bytes] = []
        while not lines and (data := self._read(limit_bytes)):
            lines = (self._rest + data).split(b"\n")
            self._rest = lines.pop()
            if len(self._rest) > LINE_LIMIT_BYTES:
                lines.append(self._rest)
                self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]

    def finish(self) -> list[str]:
        """Return the unfinished last line, if any, and close the file."""
        rest, self._rest = self._rest, b""
        if self._file is not None:
            self._file.close()
            self._file = None
        return [rest.decode("utf-8", "replace")] if rest else []

    def _open(self) -> bool:
        try:
            self._file = self.path.open("rb", buffering=0)
        except OSError:
            return False
        return True

    def _read(self, limit_bytes: int) -> bytes:
        if self._file is None:  # its successor could not be opened yet
            return b""
        return self._file.read(limit_bytes) or self._after_end(limit_bytes)

    def _after_end(self, limit_bytes: int) -> bytes:
        """At the end of the open file: go on with its successor, or from its start if it was cut."""
        assert self._file is not None
        mine = os.fstat(self._file.fileno())
        try:
            present = self.path.stat()
        except OSError:
            return b""
        if present.st_ino != mine.st_ino or present.st_dev != mine.st_dev:
            last = self._file.read(limit_bytes)  # written between the read and the rotation
            if last:
                return last
            self._file.close()
            self._file = None
            return self._file.read(limit_bytes) if self._open() and self._file else b""
        if mine.st_size < self._file.tell():
            self._rest = b""
            self._file.seek(0)
            return self._file.read(limit_bytes)
        return b""


class EventTail:
    """Follows an events file; torn lines, other versions and what is no event are counted and skipped."""

    def __init__(self, path: str | Path) -> None:
        self._lines = LineTail(path)
        self.skipped = 0

    def poll(self) -> list[dict[str, Any]]:
        """Return new events, oldest first, of about a MiB; empty only where none is left.

        Kinds that this version does not know are passed on as they are.
        """
        events: list[dict[str, Any]] = []
        while not events and (lines := self._lines.poll()):
            for line in lines:
                event = parse_event(line) if line.strip() else None
                if event is not None:
                    events.append(event)
                elif line.strip():
                    self.skipped += 1
        return events

    def close(self) -> None:
        """Close the file; an unfinished last line is torn and no event."""
        self._lines.finish()


def tail_events(path: str | Path) -> EventTail:
    """Return an `EventTail` that starts at the beginning of `path`, which need not exist yet."""
    return EventTail(path)


def read_events(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield all events that are in a file now, however long it is."""
    tail = EventTail(path)
    while events := tail.poll():
        yield from events
    tail.close()


_COMMON: dict[str, tuple[type, ...]] = {"kind": (str,), "time": (int, float), "rank": (int,), "step": (int,)}
"""What readers rely on in events of every kind, where it is there; `kind` always is."""


def parse_event(line: str) -> dict[str, Any] | None:
    """Return the event in `line`, or None if it is torn, of another protocol version, or no event."""
    try:
        event = parse_object(line)
    except ValueError:
        return None
    sound = all(isinstance(event[name], types) for name, types in _COMMON.items() if name in event)
    return event if sound and "kind" in event and event.get("v") == PROTOCOL_VERSION else None


def strip_ansi(text: str) -> str:
    """Return `text` without terminal escape sequences (ECMA-48)."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def sample_lines(lines: Sequence[str], keep: int, where: str) -> list[str]:
    """Return at most `keep` of `lines`, the first and last ones, and a line that says what was left out."""
    if len(lines) <= keep:
        return list(lines)
    head = keep // 2
    left_out = len(lines) - keep
    return [
        *lines[:head],
        f"... {left_out} lines left out here; all of them are in {where}",
        *lines[-(keep - head) :],
    ]


def last_lines(path: str | Path, count: int = 40) -> list[str]:
    """Return the last `count` lines of a file (with its rotated predecessor), empty if there is none."""
    found: list[bytes] = []
    for name in (Path(path), Path(f"{path}.1")):
        try:
            with name.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 256 * 1024))
                found = file.read().splitlines()[-count:] + found
        except OSError:
            continue
        if len(found) >= count:
            break
    return [line.decode("utf-8", "replace") for line in found[-count:]]
