"""Flow runs on a real server that suffer: every attempt can be seen, and they end well or say why not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.objects import State
from prefect.client.schemas.sorting import ArtifactSort
from prefect.flow_runs import resume_flow_run, suspend_flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Paused, Scheduled

from benchmarks.preloaded import forked
from soup_flows import run_files
from soup_flows.flows import soup_train
from soup_flows.hardware import detect
from soup_flows.launch.events import tail_events
from soup_flows.ledger import read_ledger
from soup_flows.measured import recall
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from soup_flows.spec import parse_spec
from tests.recovery.conftest import HOOKS, losses

pytestmark = [pytest.mark.server, pytest.mark.ranks, pytest.mark.usefixtures("prefect_server")]
LONG = pytest.mark.long
FORKED = Callable[[str | None], None]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, zygote: Path) -> FORKED:
    """Fork the ranks of this test's flow runs, with a script that each of them runs first."""
    real = run_files.build_launch_plan

    def use(hook: str | None) -> None:
        file = HOOKS / f"{hook}.py" if hook else None
        monkeypatch.setattr(
            run_files, "build_launch_plan", lambda **values: forked(real(**values), zygote, file)
        )

    use(None)
    return use


@pytest.fixture
def values(parameters: Callable[..., dict[str, Any]], tmp_path: Path) -> dict[str, Any]:
    """A run of 6 steps that saves every second one."""
    found = parameters("ddp", tmp_path / "out", max_steps=6)
    found["recovery"] = {"save_steps": 2, "backoff_s": 0}
    found["data"] = {"max_length": 96, "cache_dir": found["data"]["cache_dir"]}
    found["validation"] = {"deep": False}
    return found


def run(values: dict[str, Any]) -> TrainReport:
    """Run the flow; the report of a failed one is read from its folder."""
    state = soup_train(**values, return_state=True)
    if state.is_completed():
        report = state.result()
        assert isinstance(report, TrainReport)
        return report
    return TrainReport.load(RunPaths.of(values["output_dir"], str(state.state_details.flow_run_id)).root)


def wait_for_a_checkpoint(
    output_dir: Path, attempt: int, flow_process: subprocess.Popen[bytes] | None = None
) -> list[int]:
    """Wait until an attempt has saved; return its ranks' process ids. A flow process must not end before."""
    while flow_process is None or flow_process.poll() is None:
        for file in output_dir.glob(f"runs/*/attempt-{attempt}/events.jsonl"):
            events = tail_events(file).poll()
            if any(event["kind"] == "checkpoint" for event in events):
                return [event["pid"] for event in events if event["kind"] == "started"]
        time.sleep(0.02)
    pytest.fail(f"the flow process ended with {flow_process.returncode} before a checkpoint")


@LONG
def test_attempts_are_visible_and_end_well(values: dict[str, Any], ranks: FORKED) -> None:
    ranks("out_of_memory")
    values["recovery"] |= {"gpu_hour_price": 2.0}
    out = Path(values["output_dir"])

    def shoot() -> None:
        os.kill(random.choice(wait_for_a_checkpoint(out, 2)), signal.SIGKILL)

    threading.Thread(target=shoot, daemon=True).start()
    report = run(values)
    ends = [(row.state, row.failure_class) for row in report.ledger]
    assert ends == [("failed", "cuda_oom"), ("failed", "rank_killed"), ("completed", None)]
    assert report.ledger == read_ledger(Path(report.run_dir) / "attempts.jsonl")
    assert report.plan is not None
    assert report.plan.batch.per_device_train_batch_size == 4
    assert report.ledger[2].from_step >= 2
    assert all(row.cost == pytest.approx(row.gpu_hours * 2) for row in report.ledger)
    assert [point.step for point in report.train] == [1, 2, 3, 4, 5, 6]
    # what the first attempt needed corrects the plan of the second, and that of the next run
    assert report.ledger[0].memory is not None
    assert report.ledger[0].memory.peak_bytes == 288 << 20
    assert report.plan.correction is not None
    assert "micro batch 8 ran out of memory needing at least 0.28 GiB" in report.plan.correction.reason
    assert recall(parse_spec(values), detect("cpu")) == report.plan.correction

    flow_run_id = UUID(report.run_id)
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
    assert "All attempts:" in page
    assert "Attempts and checkpoints" in found["soup-train-report"]


@LONG
@pytest.mark.parametrize("on_nan", ["stop", "skip_batch", "lower_learning_rate"])
def test_a_loss_that_is_not_finite(on_nan: str, values: dict[str, Any], ranks: FORKED) -> None:
    ranks("not_finite")
    values["recovery"] |= {"on_nan": on_nan}
    report = run(values)
    first = report.ledger[0]
    assert (first.failure_class, first.good_step) == ("nan_loss", 4)
    assert "not finite in step 5" in first.cause
    if on_nan == "stop":
        assert (report.state, len(report.ledger)) == ("failed", 1)
        return
    assert report.state == "completed"
    second = report.ledger[1]
    assert (second.from_step, second.state) == (4, "completed")
    assert [step for step, _ in losses(report)] == [1, 2, 3, 4, 5, 6]
    points = {point.step: point for point in report.train}
    if on_nan == "skip_batch":
        assert second.change.skip_steps == (5,)
        assert points[5].loss == 0.0
        assert points[6].loss is not None
        assert points[6].loss > 0
    else:
        assert second.change.learning_rate_scale == 0.5
        assert points[5].loss is not None
        assert points[5].learning_rate is not None
        assert points[4].learning_rate is not None
        assert points[5].learning_rate < 0.6 * points[4].learning_rate


def process(flow_run_id: UUID, zygote: Path, hook: str | None = None) -> subprocess.Popen[bytes]:
    """Start the process of a flow run that the server knows."""
    environment = os.environ | {"PREFECT_API_URL": str(PREFECT_API_URL.value())}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, str(Path(__file__).with_name("flow_process.py")), str(flow_run_id), str(zygote)]
    return subprocess.Popen([*argv, *([str(HOOKS / f"{hook}.py")] if hook else [])], env=environment)


def state_of(flow_run_id: UUID) -> State:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run_id).state
    assert state is not None
    return state


def test_a_killed_flow_process_goes_on_under_the_same_flow_run(values: dict[str, Any], zygote: Path) -> None:
    """The next process with the same flow-run id continues the ledger, the checkpoint and the run directory."""
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(soup_train, parameters=values)
    out = Path(values["output_dir"])
    first = process(flow_run.id, zygote)
    pids = wait_for_a_checkpoint(out, 1, first)
    first.kill()
    first.wait()
    with get_client(sync_client=True) as client:  # as an automation that restarts crashed runs does
        client.set_flow_run_state(flow_run.id, Scheduled(), force=True)
    assert process(flow_run.id, zygote).wait() == 0
    assert state_of(flow_run.id).is_completed()
    (folder,) = out.glob("runs/*")
    report = TrainReport.load(folder)
    assert report.run_id == str(flow_run.id)
    assert [(row.number, row.state) for row in report.ledger] == [(1, "lost"), (2, "completed")]
    assert report.ledger[0].failure_class == "preempted"
    assert report.ledger[1].from_step == report.ledger[0].good_step >= 2
    assert [point.step for point in report.train] == [1, 2, 3, 4, 5, 6]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@LONG
@pytest.mark.parametrize("verb", ["pause", "suspend"])
def test_a_paused_run_saves_frees_its_devices_and_goes_on(
    verb: str, values: dict[str, Any], zygote: Path
) -> None:
    values["recovery"] |= {"save_steps": 100}
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow(soup_train)
        deployment_id = client.create_deployment(flow_id, f"test-{verb}")
        flow_run = client.create_flow_run_from_deployment(deployment_id, parameters=values)
    first = process(flow_run.id, zygote, "slow")
    attempt = RunPaths.of(values["output_dir"], str(flow_run.id)).attempt(1)
    while not any(event["kind"] == "metrics" for event in tail_events(attempt.events).poll()):
        assert first.poll() is None
        time.sleep(0.05)
    if verb == "pause":
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Paused(timeout_seconds=3600))
    else:
        suspend_flow_run(flow_run_id=flow_run.id, timeout=3600)
    while not attempt.receipt.exists():
        time.sleep(0.05)
    assert state_of(flow_run.id).is_paused()
    if verb == "suspend":
        first.wait()
        assert state_of(flow_run.id).name == "Suspended"
    resume_flow_run(flow_run.id)
    second = process(flow_run.id, zygote) if verb == "suspend" else first
    assert second.wait() == 0
    assert state_of(flow_run.id).is_completed()
    report = TrainReport.load(attempt.root.parent)
    assert [(row.number, row.state) for row in report.ledger] == [(1, "cancelled"), (2, "completed")]
    assert f"saved at step {report.ledger[1].from_step}" in report.ledger[0].cause
    assert 1 <= report.ledger[1].from_step < 6
    assert [point.step for point in report.train] == [1, 2, 3, 4, 5, 6]


@LONG
def test_the_same_work_twice(values: dict[str, Any], ranks: FORKED) -> None:
    """An unfinished equal run is continued, a finished one's report is returned and nothing is launched."""
    ranks("not_finite")
    broken = run(values)
    assert broken.state == "failed"
    ranks(None)
    values["recovery"] |= {"reuse": "any"}
    second = run(values)
    assert second.run_id != broken.run_id
    assert (second.state, second.started_from) == ("completed", 4)
    assert second.resumed is not None
    assert broken.run_id in second.resumed.checkpoint
    third = run(values)
    assert (third.run_id, third.ledger) == (second.run_id, second.ledger)
    assert len(list(Path(values["output_dir"]).glob("runs/*"))) == 2
    values["training"] |= {"seed": 7}
    other = run(values | {"recovery": values["recovery"] | {"reuse": "finished"}})
    assert (other.run_id != second.run_id, other.started_from) == (True, 0)
