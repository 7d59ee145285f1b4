"""A sharding config under change, with a note about every change."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

from soup_flows.errors import Problem, Refused


class ConfigEdit:
    """Changes a copy of a config and notes each change as `key: old -> new: why`.

    Attributes:
        cfg: the changed copy.
        notes: one line per change, in order.
    """

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self.cfg: dict[str, Any] = copy.deepcopy(dict(cfg))
        self.notes: list[str] = []

    def set(self, path: str, value: Any, why: str) -> None:
        """Set the dotted `path` and note it, unless it already is `value`."""
        *parents, key = path.split(".")
        block = self.cfg
        for parent in parents:
            block = block.setdefault(parent, {})
        old = block.get(key)
        if key in block and old == value and type(old) is type(value):
            return
        before = json.dumps(old) if key in block else "not set"
        block[key] = value
        self.notes.append(f"{path}: {before} -> {json.dumps(value)}: {why}")

    def drop(self, path: str, why: str) -> None:
        """Remove the dotted `path` if it is there, and note it."""
        *parents, key = path.split(".")
        block = self.cfg
        for parent in parents:
            block = block.get(parent, {})
        if key in block:
            self.notes.append(f"{path}: {json.dumps(block.pop(key))} -> dropped: {why}")


def raise_together(*parts: Callable[[], None]) -> None:
    """Run every part, then raise the problems of all of them at once.

    Raises:
        Refused: with the problems of every part that was refused.
    """
    problems: list[Problem] = []
    for part in parts:
        try:
            part()
        except Refused as refused:
            problems.extend(refused.problems)
    if problems:
        raise Refused(problems)
