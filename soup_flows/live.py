"""A running attempt as Prefect shows it: progress, the page `soup-train-live`, and events to act on.

Everything here runs in the thread that follows the ranks' files, or after the attempt; it never raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from prefect import State, runtime
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.states import Running

from soup_flows.artifacts import create_artifact, update_artifact
from soup_flows.launch.plan import LaunchPlan
from soup_flows.live_state import LiveState, live_page, summary
from soup_flows.report import TrainReport
from soup_flows.terminal import new_bar

logger = logging.getLogger(__name__)

LIVE_KEY = "soup-train-live"
PROGRESS_KEY = "soup-train-progress"
EVERY_S = 10.0
"""Seconds between two updates of the page, the progress and the event `soup.train.progress`."""
PAYLOAD_TEXT_LIMIT = 2000
"""Characters of a text in an event; an event may hold 1.5 MB (prefect, settings/models/server/events.py)."""


class LiveView:
    """Keeps the page, the progress bar and the events of one attempt up to date.

    Args:
        launch: the attempt.
        every_s: seconds between two updates.
    """

    def __init__(self, launch: LaunchPlan, every_s: float = EVERY_S) -> None:
        self.state = LiveState()
        self._launch = launch
        self._every_s = every_s
        self._published = 0.0
        self._artifacts: dict[str, UUID | None] = {}
        # A worker's runs have its terminal for log lines alone.
        self._bar = new_bar() if runtime.deployment.id is None else None

    def on_events(self, events: Sequence[dict[str, Any]]) -> None:
        """Take in events of the ranks; at most every `every_s` seconds show them."""
        self.state.update(events)
        if self._bar is not None and not self.state.finished:
            self._bar.show(self.state.percent, summary(self.state))
        if runtime.flow_run.id is None:
            return
        for event in events:
            self._emit_for(event)
        now = time.monotonic()
        if self.state.finished or now - self._published >= self._every_s:
            self._published = now
            self._publish()

    def end(self) -> None:
        """Show the last state of an attempt that did not end well, which sends no event of its own at its end."""
        if not self.state.finished and runtime.flow_run.id is not None:
            self.state.ended_early = True
            self._publish()

    def leave_terminal(self) -> None:
        """Take the bar away, however the attempt ended."""
        if self._bar is not None:
            self._bar.end()

    def _emit_for(self, event: dict[str, Any]) -> None:
        kind, run_id = event["kind"], self._launch.run_id
        if kind == "started" and event.get("rank") == 0:
            emit("started", run_id, attempt=self._launch.attempt, world_size=event.get("world_size"))
        elif kind == "resumed" and event.get("rank") == 0:
            emit("resumed", run_id, step=event.get("step"))
        elif kind == "metrics" and event.get("rank") == 0 and event.get("loss", 0.0) is None:
            emit("nan", run_id, step=event.get("step"), attempt=self._launch.attempt)
        elif kind.startswith("checkpoint") and event.get("rank") == 0:
            emit("checkpoint", run_id, step=event.get("step"), what=kind, path=event.get("path"))
        elif kind in ("mirrored", "mirror_failed"):
            emit(kind, run_id, **{k: event.get(k) for k in ("what", "url", "bytes", "reason") if k in event})

    def _publish(self) -> None:
        state = self.state
        percent, text = (100.0 if state.finished else state.percent), summary(state)
        for key, kind, data in (
            (PROGRESS_KEY, "progress", percent),
            (LIVE_KEY, "markdown", live_page(state)),
        ):
            try:
                known = self._artifacts.get(key)
                if known is None:
                    self._artifacts[key] = create_artifact(key, kind, data, text)
                else:
                    update_artifact(known, data, text)
            except Exception as error:  # the API may be down for a while; the next update shows all
                logger.info("%s could not be updated: %s", key, error)
        emit(
            "progress",
            self._launch.run_id,
            step=state.step,
            total_steps=state.total_steps,
            loss=state.loss,
            tokens_per_second=state.tokens_per_second,
            eta_s=state.eta_s,
            stragglers=state.stragglers(),
        )


class Waiting:
    """Says in the flow run's own state what it waits for, as a `Running` with the name Waiting; it never raises.

    A run that is not running, such as one that is being cancelled, keeps its state.
    """

    def __init__(self) -> None:
        self._text = ""

    def say(self, text: str) -> None:
        """Say what is waited for, such as `slurm: waits: Resources`; empty once the run goes on."""
        flow_run_id = runtime.flow_run.id
        if flow_run_id is None or text == self._text:
            return
        self._text = text
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(flow_run_id).state
                if state is not None and state.is_running():
                    said: State = Running(name="Waiting" if text else "Running", message=text or None)
                    client.set_flow_run_state(flow_run_id, said)
        except Exception as error:
            logger.info("the state could not say %r: %s", text, error)


def emit_end(report: TrainReport) -> None:
    """Emit how the run ended: `soup.train.completed`, or `.failed.<class>` (and `.stalled` for a stall)."""
    payload = {"steps": report.steps, "run_dir": report.run_dir, "seconds": report.seconds}
    if report.state == "completed":
        emit("completed", report.run_id, **payload, loss=report.final_loss, model=report.model)
        return
    payload |= {"cause": report.cause, "advice": report.advice, "state": report.state}
    if report.failure_class == "stalled":
        emit("stalled", report.run_id, **payload)
    emit(f"failed.{report.failure_class}", report.run_id, **payload)


def emit(name: str, run_id: str, **payload: Any) -> None:
    """Emit `soup.train.<name>` about a run, related to the present flow run, if there is one."""
    flow_run_id = runtime.flow_run.id
    if flow_run_id is None:
        return
    short = {k: v[:PAYLOAD_TEXT_LIMIT] if isinstance(v, str) else v for k, v in payload.items()}
    try:
        emit_event(
            f"soup.train.{name}",
            resource={
                "prefect.resource.id": f"soup.train.{run_id}",
                "prefect.resource.name": f"soup-train {run_id}",
            },
            related=[
                {
                    "prefect.resource.id": f"prefect.flow-run.{flow_run_id}",
                    "prefect.resource.role": "flow-run",
                }
            ],
            payload=short,
        )
    except Exception as error:
        logger.info("the event soup.train.%s could not be sent: %s", name, error)
