"""What the server says about the flow run that this code runs in, asked without ever waiting for it for long."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause

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
def own_run_watch(on_pause: Callable[[], object] = lambda: None) -> Iterator[Callable[[], str | None]]:
    """Watch the flow run's state on the server, in a thread of its own, since calls block through an outage.

    After a server outage, or when the worker is dead, Prefect's own cancellation never arrives; the run's
    state does. Prefect does not interrupt a task when its run is paused or suspended either.

    Args:
        on_pause: called once, in the thread, when the run is paused or suspended.

    Yields:
        A function that says why the run should stop, or None; it answers at once.
    """
    flow_run_id = runtime.flow_run.id
    found: list[str] = []
    ended, paused = threading.Event(), threading.Event()

    def watch() -> None:
        while not found and not ended.wait(WATCH_EVERY_S):
            with contextlib.suppress(Exception):
                state = _read_state(str(flow_run_id))
                if state is not None and (state.is_cancelling() or state.is_final()):
                    found.append(f"the server says the run is {state.name}")
                if state is not None and state.is_paused() and not paused.is_set():
                    on_pause()
                    paused.set()

    if flow_run_id is not None:
        _in_thread(watch, "soup-own-run-watch")
    try:
        yield lambda: found[0] if found else None
    finally:
        ended.set()


def cancel_was_asked() -> bool:
    """Return whether the server has this flow run as being cancelled; False if it does not answer in time."""
    state = _own_state()
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def wait_while_paused() -> bool:
    """Wait while the server has this flow run as paused.

    Returns:
        Whether it was paused and then resumed; False if it was not, or came to another end meanwhile.

    Raises:
        Pause: if the run is suspended: its process ends, and the run is scheduled again when it is resumed.
    """
    state, waited = _own_state(), False
    while state is None or state.is_paused():
        if state is None and not waited:
            return False
        if state is not None and state.state_details.pause_reschedule:
            raise Pause(state=state)
        waited = True
        time.sleep(WATCH_EVERY_S)
        state = _own_state()
    return waited and state.is_running()


def _own_state() -> State | None:
    """Return this flow run's state; None outside a run, and if the server does not answer in time."""
    flow_run_id = runtime.flow_run.id
    if flow_run_id is None:
        return None
    found: list[State | None] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            found.append(_read_state(str(flow_run_id)))

    _in_thread(ask, "soup-own-state").join(ANSWER_S)
    return found[0] if found else None
