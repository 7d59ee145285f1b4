"""Drills with a real Prefect server and a real process worker; they share one server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from soup_flows.drill import Watch, parameters
from soup_flows.drill.server import Site, wait_for
from soup_flows.flows import soup_train
from soup_flows.launch import proc
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from tests.drills.submitting import submit_training

pytestmark = [pytest.mark.server, pytest.mark.ranks, pytest.mark.long]
GENEROUS_S = 300


@pytest.fixture(scope="module")
def site(site_type: type[Site]) -> Iterator[Site]:
    with site_type.start() as site:
        yield site


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drills")


def artifacts_of(run_id: str) -> dict[str, list[Any]]:
    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(run_id)]))
    with get_client(sync_client=True) as client:
        found: dict[str, list[Any]] = {}
        for artifact in client.read_artifacts(artifact_filter=chosen):
            found.setdefault(str(artifact.key), []).append(artifact)
    return found


def events_of(site: Site, run_id: str) -> set[str]:
    chosen = {"resource": {"id": [f"soup.train.{run_id}"]}}
    answer = httpx.post(f"{site.url}/events/filter", json={"filter": chosen, "limit": 50}, timeout=60)
    return {event["event"] for event in answer.raise_for_status().json()["events"]}


def test_an_outage_of_the_server_loses_nothing(site: Site, folder: Path) -> None:
    result = site.drill("server_down_30s", folder)
    assert result.passed, result
    report = TrainReport.load(result.run_dir)
    assert [point.step for point in report.train] == list(range(1, report.steps + 1))
    found = artifacts_of(report.run_id)
    (page,) = found["soup-train-live"]  # one artifact, updated, however often it changed
    (progress,) = found["soup-train-progress"]
    assert str(page.data).count("```mermaid") == 2
    assert "| rank |" in str(page.data)
    assert progress.data == 100
    wanted = {"soup.train.started", "soup.train.progress", "soup.train.completed"}
    wait_for(lambda: wanted <= events_of(site, report.run_id), 60, "the run's events")


def test_cancel(site: Site, folder: Path) -> None:
    result = site.drill("cancel", folder)
    assert result.passed, result
    wait_for(
        lambda: "soup.train.failed.cancelled" in events_of(site, Path(result.run_dir).name), 60, "the event"
    )


def test_cancel_of_a_submitted_launch(site: Site, folder: Path) -> None:
    run_id = site.submit(submit_training, {"values": parameters("cancel", folder)})
    watch = Watch(RunPaths.of(folder, str(run_id)), lambda: site.state(run_id).is_final() or None)
    with watch.until_clean():
        wait_for(lambda: watch.poll() >= 3, GENEROUS_S, "a step")
        watch.cause = time.time()
        site.cancel(run_id)
    result = watch.result("cancel")
    assert result.passed, result
    assert site.state(run_id).is_cancelled()
    assert TrainReport.load(watch.paths.root).state == "cancelled"


def test_the_hook_reports_for_a_flow_that_was_killed_with_its_supervisor(site: Site, folder: Path) -> None:
    run_id = site.submit(soup_train, parameters("cancel", folder))
    watch = Watch(RunPaths.of(folder, str(run_id)), lambda: site.state(run_id).is_final() or None)
    with watch.until_clean():
        wait_for(lambda: watch.poll() >= 3, GENEROUS_S, "a step")
        (supervisor,) = proc.marked(str(run_id), proc.SUPERVISOR_MARKER)
        flow = proc.parent_of(supervisor)
        assert flow is not None
        os.kill(supervisor, signal.SIGSTOP)
        os.kill(flow, signal.SIGKILL)
        os.kill(supervisor, signal.SIGKILL)
    assert site.state(run_id).is_crashed()
    wait_for(watch.paths.report.exists, GENEROUS_S, "a report by the hook")
    report = TrainReport.load(watch.paths.root)
    assert report.state == "failed"
    assert report.failure_class == "rank_killed"
    assert "Crashed" in report.cause
    assert report.steps >= 3
    assert not list(watch.paths.temp.iterdir())


def test_a_dead_worker(site: Site, folder: Path) -> None:
    result = site.drill("kill_worker", folder)
    assert result.passed, result
