"""What a run shows in Prefect while it runs and when it ends: events of every kind, progress, the live page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling

from soup_flows.launch.plan import build_launch_plan
from soup_flows.live import LiveView, Waiting, emit_end
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("prefect_server")]
GENEROUS_S = 120

RANKS: list[dict[str, Any]] = [
    {"kind": "started", "rank": 0, "world_size": 2},
    {"kind": "started", "rank": 1, "world_size": 2},
    {"kind": "data", "rank": 0, "total_steps": 40},
    {"kind": "resumed", "rank": 0, "step": 10},
    *({"kind": "step", "rank": r, "step": 11, "seconds": 2.0, "tokens": 500} for r in (0, 1)),
    {"kind": "metrics", "rank": 0, "step": 11, "loss": 2.5, "learning_rate": 1e-4},
    {"kind": "checkpoint", "rank": 0, "step": 11, "path": "/c/11"},
    {"kind": "something new", "rank": 0},
]


@flow
def lives_and_ends(folder: str) -> str:
    run_id = str(runtime.flow_run.id)
    plan = build_launch_plan(
        paths=RunPaths(Path(folder)), run_id=run_id, attempt=1, nproc_per_node=2, device="cpu",
        config_path=None, omp_num_threads=1, stop_budget_s=20, timeout_s=None,
    )  # fmt: skip
    view = LiveView(plan, every_s=0)
    for event in RANKS:
        view.on_events([event])
    view.end()
    ends: list[dict[str, Any]] = [
        {"state": "failed", "failure_class": "stalled", "cause": "rank 1 in all_reduce"},
        {"state": "completed"},
    ]
    for end in ends:
        emit_end(TrainReport(run_id=run_id, run_dir=folder, steps=11, **end))
    return run_id


def test_every_kind_of_event_reaches_the_server(tmp_path: Path) -> None:
    run_id = lives_and_ends(str(tmp_path))
    wanted = {f"soup.train.{name}" for name in ("started", "progress", "checkpoint", "stalled",
              "failed.stalled", "resumed", "completed")}  # fmt: skip
    question = {"filter": {"resource": {"id": [f"soup.train.{run_id}"]}}, "limit": 50}
    end = time.monotonic() + GENEROUS_S
    found: dict[str, dict[str, Any]] = {}
    while not wanted <= set(found) and time.monotonic() < end:
        answer = httpx.post(f"{PREFECT_API_URL.value()}/events/filter", json=question, timeout=60)
        found = {event["event"]: event for event in answer.raise_for_status().json()["events"]}
        time.sleep(0.2)
    assert set(found) == wanted
    for event in found.values():
        assert f"prefect.flow-run.{run_id}" in {r["prefect.resource.id"] for r in event["related"]}
    assert found["soup.train.started"]["payload"]["world_size"] == 2
    assert found["soup.train.checkpoint"]["payload"]["path"] == "/c/11"
    assert found["soup.train.failed.stalled"]["payload"]["cause"] == "rank 1 in all_reduce"

    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(run_id)]))
    with get_client(sync_client=True) as client:
        artifacts = {a.key: a for a in client.read_artifacts(artifact_filter=chosen)}
    progress, page = artifacts["soup-train-progress"], artifacts["soup-train-live"]
    assert progress.data == pytest.approx(100 * 11 / 40)
    assert progress.description == "step 11 of 40, loss 2.5, 500 tokens/s"
    assert str(page.data).startswith("# Ended early: step 11 of 40")


@flow
def waits() -> list[tuple[str | None, str | None]]:
    waiting = Waiting()

    def told(text: str) -> tuple[str | None, str | None]:
        waiting.say(text)
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(str(runtime.flow_run.id))).state
            return state and state.name, state and state.message

    seen = [told("slurm: waits: Resources"), told("")]
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(str(runtime.flow_run.id)), Cancelling())
    return [*seen, told("slurm: waits: Priority")]


def test_the_state_says_what_a_run_waits_for_and_a_cancel_stays() -> None:
    Waiting().say("outside of a flow")
    assert waits() == [("Waiting", "slurm: waits: Resources"), ("Running", None), ("Cancelling", None)]
