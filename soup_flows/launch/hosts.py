"""Notice that another host of the run is gone, from the files in which supervisors show that they live.

Neither torch elastic nor a collective notices a host that loses its power: its peers hear nothing, and wait.
Standard library.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from soup_flows.launch import layout
from soup_flows.launch.watchdog import PAUSED_S
from soup_flows.paths import AttemptPaths

BEAT_S = 5.0
"""Seconds between two signs of life."""
SILENT_S = 90.0
"""A host without one for this long is lost: NFS may show a change a minute late (`man 5 nfs`, acregmax)."""
RUNS, ENDED = "runs", "ended"
"""What a host says of itself; after `ended` its silence means nothing."""


class Hosts:
    """This host's sign of life, and the age of the others' by this host's clock."""

    def __init__(self, attempt: Path, node: int, nodes: int, floor_s: float) -> None:
        self.attempt, self.node = attempt, node
        self.others = [number for number in range(nodes) if number != node]
        self.limit_s = min(SILENT_S, floor_s)
        self._seen: dict[int, tuple[int, float]] = {}
        self._beat_at: float | None = None
        self._looked = 0.0

    def beat(self, now: float) -> None:
        """Show that this host lives, when it is time to; `now` is monotonic time in seconds."""
        if not self.others or (self._beat_at is not None and now < self._beat_at):
            return
        path = layout.host_beat(self.attempt, self.node)
        with contextlib.suppress(OSError):
            if self._beat_at is None:
                self._write(path, RUNS)
            else:
                os.utime(path)  # that works on a full disk
        self._beat_at = now + BEAT_S

    def end(self) -> None:
        """Say that nothing of the run is left here."""
        if self.others:
            with contextlib.suppress(OSError):
                self._write(layout.host_beat(self.attempt, self.node), ENDED)

    @staticmethod
    def _write(path: Path, word: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{os.uname().nodename} {word}\n")

    def lost(self, now: float, quiet_s: float) -> str | None:
        """Say which host is gone, or None: it has been silent for `limit_s`, and no rank made a step meanwhile.

        A host that never showed itself is waited for by torch elastic.

        Args:
            now: monotonic time in seconds.
            quiet_s: seconds since any rank was last heard.
        """
        paused = now - self._looked > PAUSED_S
        self._looked = now
        found = []
        for node in self.others:
            path = layout.host_beat(self.attempt, node)
            with contextlib.suppress(OSError):
                changed = path.stat().st_mtime_ns
                if paused or self._seen.get(node, (0, 0.0))[0] != changed:
                    self._seen[node] = (changed, now)
                silent_s = now - self._seen[node][1]
                if silent_s > self.limit_s and quiet_s > self.limit_s / 2:
                    name, word = _read(
                        path
                    )  # only now: every supervisor comes by twice a second, on shared storage
                    if word == RUNS:
                        found.append(f"{name} has given no sign of life for {silent_s:.0f} s")
        return "; ".join(found) or None


def missing(attempt: Path) -> list[str]:
    """Return the names of the hosts that never said that they ended, and left no receipt either."""
    found, of = [], AttemptPaths(attempt)
    for path in sorted(attempt.glob(layout.HOST_BEATS)):
        with contextlib.suppress(OSError):
            name, word = _read(path)
            number = path.name.rsplit("_", 1)[1]
            if word == RUNS and number.isdecimal() and not of.receipt_of(int(number)).exists():
                found.append(name)
    return found


def _read(path: Path) -> tuple[str, str]:
    """Return name and word of a sign of life; both empty for one that is just being written."""
    with path.open(errors="replace") as file:
        words = file.read(400).split()
    return (words[0], words[1]) if len(words) == 2 else ("", "")
