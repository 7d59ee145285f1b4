"""A flow whose ranks only pretend to train, for drills about flows, workers and launches that need no training."""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from soup_flows.attempt import run_attempt
from soup_flows.drill.flow_process import rehearsal_plan
from soup_flows.hooks import sweep_run
from soup_flows.launch.plan import LeaseSettings
from soup_flows.own_run import cancel_was_asked, own_run_watch


@flow(
    name="soup-rehearsal",
    validate_parameters=False,
    on_cancellation=[sweep_run],
    on_crashed=[sweep_run],
)
def rehearsal(
    values: dict[str, Any], output_dir: str, elastic: bool = True, lease: bool = True
) -> State | None:
    """Launch the ranks as `launch distributed train` launches those that train.

    Args:
        values: parameters of `soup-train`, of which the group `launcher` counts.
        output_dir: the same as in `values`; the hooks look for it here.
        elastic: start them under torch elastic.
        lease: hold two CPU cores meanwhile.
    """
    del output_dir
    devices = LeaseSettings(kind="core") if lease else None
    plan = rehearsal_plan(values, str(runtime.flow_run.id), devices, elastic)
    with own_run_watch() as server_says:
        outcome = run_attempt(plan, get_run_logger(), server_says)
    return Cancelled(message=outcome.receipt["detail"]) if cancel_was_asked() else None
