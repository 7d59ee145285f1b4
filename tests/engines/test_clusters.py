"""What every cluster has to do alike: several machines, and a flow that died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from soup_flows.checkpoints import list_checkpoints, verify
from soup_flows.hooks import sweep_run
from soup_flows.launch.plan import LaunchPlan
from soup_flows.report import TrainReport
from tests.engines.conftest import (
    Light,
    Maker,
    Run,
    a_flow_on,
    job_of,
    losses,
    marked,
    on_machines,
    until,
)

pytestmark = [pytest.mark.ranks, pytest.mark.long]

SUBMIT = """
import sys
from soup_flows.attempt import engine
from soup_flows.launch.plan import LaunchPlan
launch = LaunchPlan.model_validate_json(open(sys.argv[1]).read())
engine(launch).submit(launch)
"""


def submitted(run: Run | Light) -> str:
    """Submit from a process that ends at once; returns the job."""
    subprocess.run([sys.executable, "-c", SUBMIT, str(run.paths.launch)], check=True)
    return job_of(run)


@pytest.mark.parametrize("ended", [False, True])
def test_the_next_start_of_a_flow_run_takes_its_job(
    ended: bool, cluster_name: str, make: Maker, undisturbed: TrainReport, prefect_server: None
) -> None:
    """The flow died after it had submitted; its job still runs, or has finished, when the flow run starts again."""
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow_sync

    from soup_flows.flows import soup_train

    run = make(cluster_name)
    parameters = run.spec.model_dump(mode="json")
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(soup_train, parameters=parameters)
    run.run_id = str(flow_run.id)
    run.prepared()
    job = submitted(run)
    if ended:
        until(lambda: a_flow_on(cluster_name).attach(run.paths) is None, "the end of the job")
    report = run_flow_sync(soup_train, flow_run=flow_run, parameters=parameters)
    assert isinstance(report, TrainReport)
    assert (report.state, report.attempts, len(report.ledger)) == ("completed", 1, 1)
    assert losses(report) == losses(undisturbed)
    assert job_of(run) == job


@pytest.mark.parametrize("preset", ["zero2", "zero3", "full_shard"])
def test_two_machines(preset: str, cluster_name: str, make: Maker) -> None:
    """One rank on each of two nodes computes what two ranks on one machine do."""
    wanted = make("local", preset).attempt()
    run = on_machines(make(cluster_name, preset, elastic=True, **{cluster_name: {"nodes": 2}}))
    report = run.attempt()
    assert report.state == "completed", report.cause
    assert report.plan is not None
    assert (report.plan.nodes, report.plan.world_size) == (2, 2)
    assert losses(report) == losses(wanted)
    logs = {path.name for path in run.paths.attempt(1).logs.iterdir()}
    assert {"rank_0.log", "rank_1.log", "launcher.log", "launcher_node_1.log"} <= logs
    assert not any(name.startswith("node_") for name in logs)
    assert not marked(run.run_id)


def test_a_killed_rank_on_the_other_machine(cluster_name: str, make: Maker) -> None:
    def kill(run: Run, launch: LaunchPlan) -> None:
        events = run.wait_for(1, "checkpoint", 3)
        os.kill(next(e["pid"] for e in events if e["kind"] == "started" and e["rank"] == 1), signal.SIGKILL)

    run = on_machines(make(cluster_name, elastic=True, **{cluster_name: {"nodes": 2}}))
    report = run.attempt(kill)
    assert report.failure_class == "rank_killed", report.cause
    assert "rank 1" in report.cause
    assert not marked(run.run_id)
    kept = list_checkpoints(run.paths.checkpoints)
    assert kept
    assert not any(verify(folder, run.run_id) for folder in kept)


def test_the_hook_of_a_cancelled_flow_ends_its_job(cluster_name: str, light: Light) -> None:
    """The flow is dead, so that only the hook is left; a crash alone leaves the job to the next start."""
    from prefect.states import Cancelled, Crashed

    class FlowRun:
        id = light.run_id
        parameters: dict[str, Any] = {"output_dir": str(light.folder)}  # noqa: RUF012

    _, plan = light.on(cluster_name, "ready()\ntime.sleep(600)\n")
    submitted(light)
    light.ranks_ready()
    assert a_flow_on(cluster_name).attach(plan.paths) is not None
    crashed = Crashed()
    crashed.timestamp = crashed.timestamp.replace(
        year=2000
    )  # else the sweep of this host would end the ranks
    sweep_run(None, FlowRun(), crashed)
    assert a_flow_on(cluster_name).attach(plan.paths) is not None
    sweep_run(None, FlowRun(), Cancelled())
    assert a_flow_on(cluster_name).attach(plan.paths) is None
    assert not marked(light.run_id)
