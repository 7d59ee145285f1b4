"""Copies an attempt's checkpoints and model to the store while it trains, in a thread of the flow process."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from soup_flows.json_text import parse_json
from soup_flows.launch.rank import EventWriter
from soup_flows.paths import RunPaths
from soup_flows.store import Store

logger = logging.getLogger(__name__)

LINKS = "mirror"
"""Folder in the run directory with hard links of what waits for its upload: rotation may remove the original."""


class Mirror:
    """The uploads of one attempt.

    Every folder that reached the store is an event `mirrored`, every other one `mirror_failed`: a store that
    does not answer costs the copy, never the training.

    Args:
        store: where to.
        paths: the run's files.
        number: the attempt.
    """

    def __init__(self, store: Store, paths: RunPaths, number: int) -> None:
        self._store, self._paths, self._attempt = store, paths, paths.attempt(number)
        self._waiting: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="soup-mirror")
        self._begun = False

    def on_events(self, events: Sequence[dict[str, Any]]) -> None:
        """Take note of the checkpoints that were sealed; returns at once."""
        for event in events:
            if event.get("kind") == "checkpoint" and event.get("rank") == 0:
                self._add(Path(str(event.get("path"))))

    def finish(self, stop: Callable[[], str | None]) -> None:
        """Wait for the uploads, the finished attempt's model the last of them; `stop` ends the wait early."""
        self._start()
        self._waiting.put(None)
        try:
            while self._thread.is_alive() and not stop():
                self._thread.join(1.0)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Wait for nothing: an upload that is not finished has no manifest and does not count."""
        shutil.rmtree(self._paths.root / LINKS, ignore_errors=True)

    def _start(self) -> None:
        if not self._begun:
            self._begun = True
            self._thread.start()

    def _add(self, folder: Path) -> None:
        """Link a checkpoint's files, so that they are still there when their turn comes."""
        links = self._paths.root / LINKS / folder.name
        try:
            shutil.rmtree(links, ignore_errors=True)
            shutil.copytree(folder, links, copy_function=os.link)
        except OSError as error:
            self._say("mirror_failed", what=folder.name, reason=f"it could not be linked: {error}")
            return
        self._start()
        self._waiting.put(links)

    def _work(self) -> None:
        while (folder := self._waiting.get()) is not None:
            self._push(folder.name, folder)
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError, ValueError):
            model = Path(parse_json(self._attempt.result.read_text())["model"])
            self._push("model", model)

    def _push(self, what: str, folder: Path) -> None:
        run_id = self._paths.root.name
        try:
            if what == "model":
                done = self._store.push_model(folder, run_id, self._attempt.root / "model-files.json")
            else:
                done = self._store.push_checkpoint(folder, run_id, what)
        except Exception as error:  # file systems raise what they like
            self._say("mirror_failed", what=what, reason=self._store.words(error))
        else:
            self._say("mirrored", **done.model_dump())

    def _say(self, kind: str, **fields: Any) -> None:
        if kind == "mirror_failed":
            logger.warning("%s is not in the store: %s", fields["what"], fields["reason"])
        writer = EventWriter(self._attempt.events, rank=0)
        writer.write(kind, **fields)
        writer.close()
