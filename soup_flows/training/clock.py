"""How long a rank's own forward passes take: what tells a slow rank from those that wait for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class WorkClock:
    """Adds up the time of forward passes without ever waiting for the device.

    A whole optimizer step takes all ranks equally long, since each waits for the slowest in its collectives.
    Under ZeRO-3 and FSDP a forward pass gathers parameters, so there the difference shows less.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._running: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Time what is done inside; on a GPU by events in its own stream."""
        if self._cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._running.append((start, end))
        else:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun

    def take(self) -> float:
        """Return the seconds since the last call; passes that the GPU has not finished count next time."""
        seconds, self._seconds = self._seconds, 0.0
        done = [pair for pair in self._running if pair[1].query()]
        self._running = [pair for pair in self._running if pair not in done]
        return seconds + sum(start.elapsed_time(end) for start, end in done) / 1000
