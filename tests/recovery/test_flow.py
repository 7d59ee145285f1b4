"""One flow run on a real server: it runs out of memory, is shot, and completes; every attempt can be seen."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.sorting import ArtifactSort

from soup_flows.flows import soup_train
from soup_flows.launch.events import tail_events
from soup_flows.ledger import read_ledger
from soup_flows.report import TrainReport

pytestmark = [
    pytest.mark.server,
    pytest.mark.ranks,
    pytest.mark.long,
    pytest.mark.usefixtures("prefect_server"),
]


def shoot(output_dir: Path) -> None:
    """SIGKILL a rank of the second attempt once it has saved."""
    while True:
        for file in output_dir.glob("runs/*/attempt-2/events.jsonl"):
            events = tail_events(file).poll()
            if any(event["kind"] == "checkpoint" for event in events):
                pids = [event["pid"] for event in events if event["kind"] == "started"]
                os.kill(random.choice(pids), signal.SIGKILL)
                return
        time.sleep(0.02)


def test_attempts_are_visible_and_end_well(
    parameters: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = tmp_path / "hook"
    hook.mkdir()
    shutil.copy(Path(__file__).with_name("out_of_memory.py"), hook / "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", f"{hook}:{os.environ.get('PYTHONPATH', '')}")
    values = parameters("ddp", tmp_path / "out", max_steps=6)
    values["recovery"] = {"save_steps": 2, "backoff_s": 0, "gpu_hour_price": 2.0}
    values["data"] = {"max_length": 96}
    values["validation"] = {"deep": False}
    threading.Thread(target=shoot, args=(tmp_path / "out",), daemon=True).start()
    state = soup_train(**values, return_state=True)
    assert state.is_completed(), state.message
    report = state.result()
    assert isinstance(report, TrainReport)
    ends = [(row.state, row.failure_class) for row in report.ledger]
    assert ends == [("failed", "cuda_oom"), ("failed", "rank_killed"), ("completed", None)]
    assert report.ledger == read_ledger(Path(report.run_dir) / "attempts.jsonl")
    assert report.plan is not None
    assert report.plan.batch.per_device_train_batch_size == 4
    assert report.ledger[2].from_step >= 2
    assert all(row.cost == pytest.approx(row.gpu_hours * 2) for row in report.ledger)
    assert [point.step for point in report.train] == [1, 2, 3, 4, 5, 6]

    flow_run_id = state.state_details.flow_run_id
    with get_client(sync_client=True) as client:
        task_runs = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
        )
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        kept = client.read_artifacts(artifact_filter=wanted, sort=ArtifactSort.UPDATED_DESC)
    launches = {run.name: run.state_name for run in task_runs if run.name.startswith("launch")}
    assert launches == {
        "launch distributed train, attempt 1": "Failed",
        "launch distributed train, attempt 2": "Failed",
        "launch distributed train, attempt 3": "Completed",
    }
    found = {artifact.key: artifact.data for artifact in sorted(kept, key=lambda a: a.created)}
    page = found["soup-train-attempts"]
    assert "micro batch 8 -> 4" in page
    assert "rank_killed" in page
    assert "Attempts and checkpoints" in found["soup-train-report"]
