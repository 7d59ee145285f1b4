"""Variables that are lent to the processes of a run and to nothing else: they never enter this process's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

_LENT: ContextVar[Mapping[str, str]] = ContextVar("soup_flows_lent", default={})  # noqa: B039 (never changed)


@contextlib.contextmanager
def lend(values: Mapping[str, str]) -> Iterator[None]:
    """Lend `values` to every process that this package starts inside the block, in this context.

    Two runs in one process, each in its own thread or task, do not see each other's.
    """
    token = _LENT.set({**_LENT.get(), **values})
    try:
        yield
    finally:
        _LENT.reset(token)


def run_environment() -> dict[str, str]:
    """Return what a process of the run inherits: this process's environment, and what is lent."""
    return {**os.environ, **_LENT.get()}
