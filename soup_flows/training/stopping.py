"""How a rank hears that it should stop: from a signal even while it is inside a collective, or from a file."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import threading
import time
from pathlib import Path

WAIT_FOR_SUPERVISOR_S = 1.0
"""Seconds in which the supervisor's file has to appear beside a SIGTERM; it is written just before it."""


class StopListener:
    """Turns SIGTERM into a wish that the training loop sees at the end of a step.

    Without the supervisor's file the signal means that another rank died (or that somebody shot this one): the
    process then ends by that signal, even when its main thread waits for ranks that are gone. With the file it
    lives on, as long as a checkpoint still fits before the deadline in it.
    """

    def __init__(self, stopping: Path) -> None:
        self.stopping = stopping
        self.deadline: float | None = None
        """Unix time at which SIGKILL comes; None as long as nobody asked to stop."""
        self.needed_s = 0.0
        """Seconds that a save takes, as predicted by the training loop."""
        self.saving = False
        """True while a checkpoint is being written."""
        self._wake, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def start(self) -> None:
        """Listen from now on; call it in the main thread."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)  # the number comes through the pipe
        threading.Thread(target=self._listen, daemon=True, name="soup-stop").start()

    def end(self) -> None:
        """Let SIGTERM end the process at once again; call it in the main thread."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.deadline is not None and not self.saving:
            _die()

    def _listen(self) -> None:
        while not self._heard():
            pass
        end = time.monotonic() + WAIT_FOR_SUPERVISOR_S
        while (deadline := self._read()) is None and time.monotonic() < end:
            time.sleep(0.02)
        if deadline is None:
            _die()
            return
        self.deadline = deadline
        while not self.saving and time.time() + self.needed_s < deadline:
            time.sleep(0.05)
        if not self.saving:
            _die()

    def _heard(self) -> bool:
        select.select([self._wake], [], [])
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in os.read(self._wake, 4096)
        return False

    def _read(self) -> float | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return float(json.loads(self.stopping.read_text())["deadline"])
        return None


def _die() -> None:
    """End this process by SIGTERM; only the C library can reset a handler outside the main thread."""
    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(0))
    os.kill(os.getpid(), signal.SIGTERM)
