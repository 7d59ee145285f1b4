"""The automations on a real server: each is set off by the events it is for, and does what it says."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.events import emit_event
from prefect.states import Cancelled, Crashed, Failed, Pending, Running, Scheduled
from prefect.types._datetime import now

from soup_flows.deploy import DeployRequest, deploy
from soup_flows.drill import Watch, parameters
from soup_flows.drill.server import POOL, Site, wait_for
from soup_flows.launch import proc
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(1800)]
GENEROUS_S = 600
SHORT_S = 10.0


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A web hook, and what it was told."""
    found: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Be quiet."""

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", found
    server.shutdown()


@pytest.fixture(scope="module")
def site(told: tuple[str, list[dict[str, Any]]], site_type: type[Site]) -> Iterator[Site]:
    """A server with everything deployed to the pool of the worker, with short limits."""
    with site_type.start() as site:
        body = {"subject": "{{subject}}", "body": "{{body}}"}
        hook = CustomWebhookNotificationBlock(
            name="hook", url=told[0], json_data=body, allow_private_urls=True
        )
        hook.save("hook", overwrite=True)
        deploy(
            DeployRequest(
                pool=POOL, automations=True, notify="custom-webhook/hook", zombie_s=SHORT_S, stall_s=SHORT_S
            )
        )
        yield site


def new_run(*states: State[Any], deployment: str = "soup-train/demo") -> UUID:
    """Create a run far in the future, which no worker takes, and bring it through `states`."""
    with get_client(sync_client=True) as client:
        far = Scheduled(scheduled_time=now("UTC") + timedelta(days=300))
        found = client.read_deployment_by_name(deployment)
        run = client.create_flow_run_from_deployment(found.id, state=far)
        for state in states:
            client.set_flow_run_state(run.id, state, force=True)
    return run.id


def beat(event: str, run_id: UUID, resource: str) -> None:
    related = [{"prefect.resource.id": f"prefect.flow-run.{run_id}", "prefect.resource.role": "flow-run"}]
    related.append({"prefect.resource.id": "prefect.flow.x", "prefect.resource.role": "flow",
                    "prefect.resource.name": "soup-train"})  # fmt: skip
    emit_event(event, resource={"prefect.resource.id": resource}, related=related)


def test_a_loss_that_is_not_finite_cancels(site: Site) -> None:
    run_id = new_run()
    beat("soup.train.nan", run_id, f"soup.train.{run_id}")
    wait_for(
        lambda: site.state(run_id).type in (StateType.CANCELLING, StateType.CANCELLED), 60, "the cancellation"
    )


def test_a_failure_is_told_with_its_cause(site: Site, told: tuple[str, list[dict[str, Any]]]) -> None:
    new_run(Pending(), Running(), Failed(message="cuda_oom after step 12: rank 1 failed first"))
    wait_for(lambda: any("rank 1 failed first" in call["body"] for call in told[1]), 60, "the notification")
    (call,) = [call for call in told[1] if "rank 1" in call["body"]]
    assert call["subject"].startswith("soup-train ")
    assert call["subject"].endswith(": Failed")


def test_a_crashed_run_is_started_again_a_few_times(site: Site) -> None:
    run_id = new_run(Pending(), Running(), Crashed(message="gone"))
    wait_for(lambda: site.state(run_id).name == "AwaitingRetry", 60, "the restart")
    with get_client(sync_client=True) as client:
        for _ in range(3):
            client.set_flow_run_state(run_id, Running(), force=True)
        client.set_flow_run_state(run_id, Crashed(message="again"), force=True)
    time.sleep(5)  # nothing is to happen, so there is nothing to wait for
    assert site.state(run_id).is_crashed()


def test_a_lost_run_is_ended(site: Site, told: tuple[str, list[dict[str, Any]]]) -> None:
    run_id = new_run(Pending(), Running())
    beat("prefect.flow-run.heartbeat", run_id, f"prefect.flow-run.{run_id}")
    wait_for(lambda: any("No heartbeat" in call["body"] for call in told[1]), 120, "the end of the lost run")
    # Crashed, and by the other automation started again.
    assert site.state(run_id).name in ("Crashed", "AwaitingRetry")
    with get_client(sync_client=True) as client:  # a worker of a later test is not to run it
        client.set_flow_run_state(run_id, Cancelled(), force=True)


def test_a_stall_is_told(site: Site, told: tuple[str, list[dict[str, Any]]]) -> None:
    run_id = new_run(Pending(), Running())
    beat("soup.train.progress", run_id, f"soup.train.{run_id}")
    wait_for(lambda: any(str(run_id) in call["body"] for call in told[1]), 120, "the warning")


def went_wrong(run_id: UUID) -> str:
    """Return what the states of a run say once it has failed; empty before."""
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(run_id)
    words = [f"{state.timestamp} {state.name}: {state.message}" for state in states]
    return "\n".join(words) if any(state.name == "Failed" for state in states) else ""


@pytest.fixture
def patient(site: Site) -> None:
    """Longer limits, for real runs: their heartbeats are half a minute apart."""
    deploy(DeployRequest(pool=POOL, automations=True, zombie_s=GENEROUS_S, stall_s=GENEROUS_S))


@pytest.mark.ranks
@pytest.mark.usefixtures("patient")
def test_a_killed_run_comes_back_and_finishes(site: Site, tmp_path: Path) -> None:
    values = parameters("cancel", tmp_path)
    values |= {"recovery": {"save_steps": 2}}
    values["launcher"] = {"stop_budget_s": 5}
    values["training"] |= {"max_steps": 30}
    with get_client(sync_client=True) as client:
        found = client.read_deployment_by_name("soup-train/demo")
        site.start_worker()
        run_id = client.create_flow_run_from_deployment(found.id, parameters=values).id
    watch = Watch(RunPaths.of(tmp_path, str(run_id)), lambda: site.state(run_id).is_final() or None)
    wait_for(lambda: watch.poll() >= 4, GENEROUS_S, "a checkpoint")
    (supervisor,) = proc.marked(str(run_id), proc.SUPERVISOR_MARKER)
    flow = proc.parent_of(supervisor)
    assert flow is not None
    os.kill(flow, signal.SIGKILL)
    wait_for(
        lambda: site.state(run_id).is_completed() or went_wrong(run_id), GENEROUS_S, "the run that came back"
    )
    assert site.state(run_id).is_completed(), went_wrong(run_id)
    report = TrainReport.load(watch.paths.root)
    assert [row.state for row in report.ledger] == ["lost", "completed"]
    assert report.started_from >= 2
    assert report.steps == 30


@pytest.mark.ranks
@pytest.mark.usefixtures("patient")
def test_a_run_with_nan_is_cancelled_and_says_why(site: Site, tmp_path: Path) -> None:
    values = parameters("nan_loss", tmp_path)
    values |= {"recovery": {"on_nan": "lower_learning_rate", "backoff_s": 30}}
    with get_client(sync_client=True) as client:
        found = client.read_deployment_by_name("soup-train/demo")
        site.start_worker()
        run_id = client.create_flow_run_from_deployment(found.id, parameters=values).id
    wait_for(lambda: site.state(run_id).is_final(), GENEROUS_S, "the end")
    assert site.state(run_id).is_cancelled()
    report = TrainReport.load(RunPaths.of(tmp_path, str(run_id)).root)
    assert len(report.ledger) == 1  # no retry
    assert report.failure_class == "nan_loss"
