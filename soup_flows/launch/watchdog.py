"""Notice that a run no longer makes steps, from the ranks' heartbeat files. Standard library."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soup_flows.launch import layout

PAUSED_S = 15.0
"""A gap between two checks longer than this means that the machine itself was paused, not the ranks."""


@dataclass
class Beat:
    """The last sign of life of one rank; times are of the supervisor's monotonic clock."""

    rank: int
    step: int
    phase: str
    seen: float
    mtime_ns: int


class Watchdog:
    """Compares the age of the ranks' last heartbeats with a threshold that the run sets itself.

    While every rank is in phase `train` the threshold is `max(floor_s, factor * longest step so far)`. Before
    the first step, and while any rank is in another phase (loading, evaluating, saving), it is `startup_s`:
    the others then wait for that rank. Once a rank is in phase `end` it is `floor_s`: all is saved, and what
    still runs hangs at its exit.
    """

    def __init__(self, attempt: Path, ranks: int, floor_s: float, factor: float, startup_s: float) -> None:
        self.attempt, self.ranks = attempt, ranks
        self.floor_s, self.factor, self.startup_s = floor_s, factor, startup_s
        self.longest_step_s = 0.0
        self.beats: dict[int, Beat] = {}
        self._checked: float | None = None

    def threshold_s(self) -> float:
        """Return how long the ranks may be quiet at present, in seconds."""
        phases = {beat.phase for beat in self.beats.values()}
        if "end" in phases:
            return self.floor_s
        training = phases == {"train"}
        return max(self.floor_s, self.factor * self.longest_step_s) if training else self.startup_s

    def quiet_s(self, now: float) -> float:
        """Return for how many seconds no rank has been heard."""
        return now - max((beat.seen for beat in self.beats.values()), default=now)

    def check(self, now: float, ended: set[int]) -> dict[str, Any] | None:
        """Read the heartbeats; return what is stuck, or None.

        Args:
            now: monotonic time in seconds.
            ended: ranks that ended cleanly and need not beat any more.

        Returns:
            None, or `{"rank", "quiet_s", "threshold_s", "beats"}` where `rank` has made the fewest steps.
        """
        if self._checked is None:
            self.beats = {rank: Beat(rank, -1, "start", now, 0) for rank in range(self.ranks)}
        elif now - self._checked > PAUSED_S:
            for beat in self.beats.values():
                beat.seen += now - self._checked
        self._checked = now
        for beat in self.beats.values():
            self._read(beat, now)
        waiting = [beat for beat in self.beats.values() if beat.rank not in ended]
        threshold = self.threshold_s()
        if not waiting or now - min(beat.seen for beat in waiting) <= threshold:
            return None
        stuck = min(waiting, key=lambda beat: (beat.step, beat.seen))
        return {
            **self._describe(stuck, now),
            "threshold_s": round(threshold, 1),
            "longest_step_s": round(self.longest_step_s, 3),
            "beats": [self._describe(beat, now) for beat in waiting],
        }

    @staticmethod
    def _describe(beat: Beat, now: float) -> dict[str, Any]:
        quiet_s = round(now - beat.seen, 1)
        return {"rank": beat.rank, "step": beat.step, "phase": beat.phase, "quiet_s": quiet_s}

    def _read(self, beat: Beat, now: float) -> None:
        path = layout.heartbeat(self.attempt, beat.rank)
        try:
            mtime_ns = os.stat(path).st_mtime_ns
            if beat.mtime_ns == mtime_ns:
                return
            text, phase = path.read_text().split()[:2]
            step = int(text)
        except (OSError, ValueError):
            return
        if beat.phase == phase == "train":
            steps = max(1, step - beat.step)
            self.longest_step_s = max(self.longest_step_s, (mtime_ns - beat.mtime_ns) / 1e9 / steps)
        beat.step, beat.phase, beat.seen, beat.mtime_ns = step, phase, now, mtime_ns
