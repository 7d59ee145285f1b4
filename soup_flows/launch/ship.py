"""Pass on what ranks write, to callbacks that may block, without ever slowing the ranks."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from soup_flows.launch import layout
from soup_flows.launch.events import LineTail, sample_lines, strip_ansi, tail_events
from soup_flows.launch.plan import LaunchPlan

logger = logging.getLogger(__name__)

OnLines = Callable[[list[str]], None]
OnEvents = Callable[[list[dict[str, Any]]], None]

LINES_PER_BATCH = 100
BATCH_S = 2.0
CATCH_UP_BYTES = 16 << 20
DRAIN_S = 15.0
"""Seconds the callbacks get for what is left after the run, since an outage must not hold up the end."""


class Tailer:
    """Passes events and rank 0's lines to the callbacks, from a daemon thread with the caller's context."""

    def __init__(
        self, plan: LaunchPlan, on_lines: OnLines | None, on_events: OnEvents | None, poll_s: float
    ) -> None:
        self._on_lines, self._on_events, self._poll_s = on_lines, on_events, poll_s
        attempt = plan.attempt_paths
        self._log = layout.rank_log(attempt.root, 0)
        self._lines, self._events = LineTail(self._log), tail_events(attempt.events)
        self._pending: list[str] = []
        self._pending_since = 0.0
        self._finished = threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._follow,), daemon=True, name="soup-flows-tail"
        )

    def start(self) -> None:
        """Start the thread, if there is a callback."""
        if self._on_lines is not None or self._on_events is not None:
            self._thread.start()

    def finish(self) -> None:
        """Pass on what is left, for at most `DRAIN_S` seconds."""
        self._finished.set()
        if self._thread.is_alive():
            self._thread.join(DRAIN_S)

    def _follow(self) -> None:
        while not self._finished.wait(self._poll_s):
            self._pass_on(last=False)
        self._pass_on(last=True)

    def _pass_on(self, last: bool) -> None:
        while events := self._events.poll():
            self._call(self._on_events, events)
        read = 0
        while read < CATCH_UP_BYTES and (lines := self._lines.poll()):
            read += sum(map(len, lines))
            self._pending += lines
        if last:
            self._pending += self._lines.finish()
        now = time.monotonic()
        if not self._pending:
            self._pending_since = now
        elif last or len(self._pending) >= LINES_PER_BATCH or now - self._pending_since >= BATCH_S:
            batch = sample_lines(self._pending, LINES_PER_BATCH, str(self._log))
            self._pending, self._pending_since = [], now
            self._call(self._on_lines, [strip_ansi(line) for line in batch])

    def _call(self, callback: Callable[[Any], None] | None, batch: Any) -> None:
        if callback is None:
            return
        try:
            callback(batch)
        except (Exception, SystemExit):  # rich raises the second when the worker that reads stdout is gone
            logger.warning("a callback failed and training goes on", exc_info=True)
