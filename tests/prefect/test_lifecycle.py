"""Tasks in flows of every kind, and states that say what happened, on a real server with ranks that pretend."""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
from prefect import flow, runtime, unmapped
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.exceptions import Abort
from prefect.flow_engine import run_flow_sync
from prefect.states import Cancelling

from soup_flows import flows, run_files, tasks
from soup_flows.drill.server import wait_for
from soup_flows.errors import Refused, TrainingFailed
from soup_flows.flows import soup_train
from soup_flows.launch import proc
from soup_flows.launch.plan import LaunchPlan
from soup_flows.paths import AttemptPaths, RunPaths
from soup_flows.plan_flow import soup_plan
from soup_flows.report import TrainReport
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import parse_spec
from soup_flows.stop import stop
from tests.core.test_run_lock import HOLD

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("prefect_server")]
ROOT = Path(__file__).parents[2]
Values = Callable[..., dict[str, Any]]

# Beats like a rank, then raises what is asked or waits for its end.
RANK = """
import sys, time
from soup_flows.launch import rank
from soup_flows.launch.rank import EventWriter
writer = EventWriter(rank.attempt_dir() / "events.jsonl", 0)
writer.write("started", world_size=1)
for step in range(1, 4):
    writer.write("metrics", step=step, loss=1.0 / step)
    rank.heartbeat(step)
what = sys.argv[1]
if what == "wait":
    time.sleep(600)
class OutOfMemory(RuntimeError):
    failure_class = what
rank.write_error(OutOfMemory("Tried to allocate 83.00 GiB"))
sys.exit(1)
"""


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let every launch start one process that pretends to be a rank."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    build = run_files.build_launch_plan

    def set_up(what: str) -> None:
        def plan(**values: Any) -> LaunchPlan:
            launch = build(**values)
            env = launch.env | {"PYTHONPATH": str(Path(tasks.__file__).parents[1])}
            return launch.model_copy(update={"argv": (sys.executable, str(script), what), "env": env})

        monkeypatch.setattr(run_files, "build_launch_plan", plan)

    return set_up


def ready(parameters: Values, folder: Path, **changes: Any) -> dict[str, Any]:
    values = parameters("ddp", folder, max_steps=4) | changes
    return values | {"recovery": {"max_retries": 0, **changes.get("recovery", {})}}


@pytest.mark.ranks
def test_the_final_message_says_what_to_do(
    parameters: Values, tmp_path: Path, pretend: Callable[[str], None]
) -> None:
    pretend("cuda_oom")
    values = ready(parameters, tmp_path, recovery={"max_retries": 1, "backoff_s": 0})
    values["training"] |= {"per_device_train_batch_size": 2}
    state = soup_train(**values, return_state=True)
    assert state.is_failed()
    message = state.message or ""
    assert "cuda_oom after step 3: rank 0 failed first" in message
    assert "Tried to allocate 83.00 GiB" in message
    assert "Tried before: micro batch" in message
    assert "What to do: Lower the micro batch" in message
    assert str(tmp_path) in message
    error = state.result(raise_on_failure=False)
    assert isinstance(error, TrainingFailed)
    again = pickle.loads(pickle.dumps(error))
    assert (again.step, again.tried, str(again)) == (error.step, error.tried, str(error))


def cancel_when_it_runs(run_id: str) -> None:
    """Cancel a flow run through the API once its ranks are there."""
    wait_for(lambda: proc.marked(run_id), 120, "the ranks")
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, Cancelling())  # type: ignore[arg-type]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kind",
    [
        "soup-train",
        "async submitted",
        pytest.param("submitted", marks=pytest.mark.long),
        pytest.param("async", marks=pytest.mark.long),
    ],
)
def test_a_cancelled_launch_cleans_up(
    parameters: Values, tmp_path: Path, pretend: Callable[[str], None], kind: str
) -> None:
    """Nothing signals this process, as after an outage of the server: the run's own watch sees the state."""
    pretend("wait")
    values = ready(parameters, tmp_path, launcher={"stop_budget_s": 3})
    ids: list[str] = []

    def plan_launch(run_id: str) -> LaunchPlan:
        spec = parse_spec(values)
        hardware = tasks.detect_hardware.fn("cpu", [])
        return tasks.write_temp_config.fn(
            spec, hardware, tasks.resolve_sharding_config.fn(spec, hardware), run_id
        )

    def begin() -> str:
        run_id = str(runtime.flow_run.id)
        ids.append(run_id)
        threading.Thread(target=cancel_when_it_runs, args=(run_id,), daemon=True).start()
        return run_id

    @flow(name="submitting")
    def submitted() -> None:
        tasks.launch_distributed_train.submit(plan_launch(begin())).result()

    @flow(name="async")
    async def direct() -> None:
        tasks.launch_distributed_train(plan_launch(begin()))

    @flow(name="async-submitting")
    async def async_submitted() -> None:
        tasks.launch_distributed_train.submit(plan_launch(begin())).result()

    if kind == "soup-train":
        original = flows.write_temp_config

        def noted(*given: Any) -> LaunchPlan:
            begin()
            launch: LaunchPlan = original(*given)
            return launch

        flows.write_temp_config = noted  # type: ignore[assignment]
        try:
            state = soup_train(**values, return_state=True)
        finally:
            flows.write_temp_config = original
        assert state.is_cancelled()
        assert "cancel" in (state.message or "").lower()
    else:
        with pytest.raises(TrainingFailed) as caught:
            asyncio.run(
                direct() if kind == "async" else async_submitted()
            ) if "async" in kind else submitted()
        assert caught.value.failure_class == "cancelled"
    assert proc.marked(ids[0]) == []
    report = TrainReport.load(next(tmp_path.glob(f"runs/{ids[0]}")))
    assert report.state == "cancelled"
    assert report.steps == 3


def test_the_tasks_can_be_mapped(parameters: Values, tmp_path: Path) -> None:
    @flow(name="mapping")
    def mapping() -> list[ShardingPlan]:
        specs = [parse_spec(parameters(preset, tmp_path)) for preset in ("zero2", "full_shard", "ddp")]
        hardware = tasks.detect_hardware.submit("cpu")
        plans = tasks.resolve_sharding_config.map(specs, unmapped(hardware))
        tasks.write_temp_config.map(specs, unmapped(hardware), plans, ["one", "two", "three"]).result()
        return plans.result()

    assert [plan.strategy for plan in mapping()] == ["zero2", "full_shard", "ddp"]
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == {"one", "two", "three"}


def test_the_plan_flow_needs_no_gpu(parameters: Values, tmp_path: Path) -> None:
    values = {
        k: v for k, v in parameters("zero3", tmp_path).items() if k in ("model", "dataset", "deepspeed")
    }
    plan = soup_plan(**values, gpu="h100-80gb", gpus=4)
    assert (plan.strategy, plan.world_size, plan.device) == ("zero3", 4, "cuda")
    assert not (tmp_path / "runs").exists()
    with pytest.raises(Refused, match="GPU001"):
        soup_plan(**values, gpu="h1000")


def test_a_time_limit_is_told(parameters: Values, tmp_path: Path, pretend: Callable[[str], None]) -> None:
    pretend("wait")
    state = soup_train(
        **ready(parameters, tmp_path, launcher={"stop_budget_s": 2, "timeout_min": 0.05}), return_state=True
    )
    assert state.is_failed()
    assert "timeout after step 3: the run was stopped" in (state.message or "")
    assert "Raise the time limit" in (state.message or "")


def test_a_second_process_of_one_flow_run_leaves_it_to_the_first(
    parameters: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may start a run again that is running: nothing is said of its end but by the process that runs it."""
    monkeypatch.setattr(flows, "CLEANING_S", 0.0)
    values = ready(parameters, tmp_path) | {"launcher": {"stop_budget_s": 1}}
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(soup_train, parameters=values)
        paths = RunPaths.of(tmp_path, str(flow_run.id))
        with Popen([sys.executable, "-c", HOLD, str(paths.root)], stdout=PIPE) as first:
            assert first.stdout is not None
            assert first.stdout.readline() == b"held\n"
            with pytest.raises(Abort, match=f"is being run by process {first.pid}"):
                run_flow_sync(soup_train, flow_run=flow_run, parameters=values)
            first.kill()
        assert client.read_flow_run(flow_run.id).state_name == "Running"
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
        assert not client.read_artifacts(artifact_filter=mine)
    assert [path.name for path in paths.root.iterdir()] == ["lock"]


@pytest.mark.ranks
def test_a_stop_on_request_is_cancelled(
    parameters: Values, tmp_path: Path, pretend: Callable[[str], None]
) -> None:
    pretend("wait")

    def ask() -> None:
        wait_for(lambda: list(tmp_path.glob("runs/*/attempt-1/events.jsonl")), 120, "the ranks")
        time.sleep(1)
        stop(AttemptPaths(next(tmp_path.glob("runs/*/attempt-1"))).root.parent)

    threading.Thread(target=ask, daemon=True).start()
    state = soup_train(**ready(parameters, tmp_path, launcher={"stop_budget_s": 2}), return_state=True)
    assert state.is_cancelled()
    assert "asked to stop" in (state.message or "")


@pytest.mark.ranks
def test_presets_are_compared_on_one_page(
    parameters: Values, tmp_path: Path, pretend: Callable[[str], None]
) -> None:
    location = importlib.util.spec_from_file_location(
        "compare_presets", ROOT / "flows" / "compare_presets.py"
    )
    assert location is not None
    assert location.loader is not None
    script = importlib.util.module_from_spec(location)
    location.loader.exec_module(script)
    pretend("cuda_oom")
    state = script.compare_presets(["zero2", "zero22"], ready(parameters, tmp_path), return_state=True)
    rows = state.result()
    assert [row.preset for row in rows] == ["zero2", "zero22"]
    assert rows[0].state.startswith("cuda_oom: rank 0 failed first")
    assert (rows[0].strategy, rows[0].final_loss) == ("zero2", pytest.approx(1 / 3))
    assert "did you mean 'zero2'" in rows[1].state
    wanted = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id]),
        key=ArtifactFilterKey(any_=["soup-train-comparison"]),
    )
    with get_client(sync_client=True) as client:
        pages = [str(artifact.data) for artifact in client.read_artifacts(artifact_filter=wanted)]
    assert any("# 2 presets compared" in page and "zero22" in page for page in pages)
