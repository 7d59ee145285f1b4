"""What the server says about the flow run that this code runs in, asked without ever waiting for it for long."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State

WATCH_EVERY_S = 5.0
"""Seconds between two looks at the run's own state on the server."""
ANSWER_S = 5.0
"""Longest wait for a single answer."""


def _in_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread with this call's context, which holds the run's API address and settings."""
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(work,), daemon=True, name=name)
    thread.start()
    return thread


def _read_state(flow_run_id: str) -> State | None:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(flow_run_id)).state


@contextlib.contextmanager
def own_run_watch() -> Iterator[Callable[[], str | None]]:
    """Watch the flow run's state on the server, in a thread of its own, since calls block through an outage.

    After a server outage, or when the worker is dead, Prefect's own cancellation never arrives; the run's
    state does.

    Yields:
        A function that says why the run should stop, or None; it answers at once.
    """
    flow_run_id = runtime.flow_run.id
    found: list[str] = []
    ended = threading.Event()

    def watch() -> None:
        while not found and not ended.wait(WATCH_EVERY_S):
            with contextlib.suppress(Exception):
                state = _read_state(str(flow_run_id))
                if state is not None and (state.is_cancelling() or state.is_final()):
                    found.append(f"the server says the run is {state.name}")

    if flow_run_id is not None:
        _in_thread(watch, "soup-own-run-watch")
    try:
        yield lambda: found[0] if found else None
    finally:
        ended.set()


def cancel_was_asked() -> bool:
    """Return whether the server has this flow run as being cancelled; False if it does not answer in time."""
    flow_run_id = runtime.flow_run.id
    if flow_run_id is None:
        return False
    found: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            state = _read_state(str(flow_run_id))
            found.append(state is not None and (state.is_cancelling() or state.is_cancelled()))

    _in_thread(ask, "soup-cancel-asked").join(ANSWER_S)
    return any(found)
