"""One case for every engine: the same run directory and the same tasks, with a real Slurm where it is asked for."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import preloaded
from soup_flows import tasks
from soup_flows.attempt import engine
from soup_flows.errors import TrainingFailed
from soup_flows.launch import proc
from soup_flows.launch.engines import Engine
from soup_flows.launch.engines.cluster import SILENCE_S, ClusterEngine
from soup_flows.launch.engines.ray import RayEngine
from soup_flows.launch.engines.slurm import SlurmEngine
from soup_flows.launch.events import tail_events
from soup_flows.launch.plan import LaunchPlan
from soup_flows.paths import RunPaths
from soup_flows.ray_settings import RaySettings
from soup_flows.report import TrainReport
from soup_flows.spec import TrainingSpec, parse_spec
from tests.engines import ray_cluster as real_ray
from tests.engines.cluster import Daemons, cluster, why_not
from tests.engines.ray_cluster import RayCluster
from tests.launch.conftest import Launch

STEPS, EVERY = 12, 3
GENEROUS_S = 400.0
Watch = Callable[["Run", LaunchPlan], None]


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Daemons]:
    """A real Slurm; the tests that need it are skipped where it cannot be started."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with cluster() as daemons:
        yield daemons


@pytest.fixture
def slurm(slurm_cluster: Daemons, monkeypatch: pytest.MonkeyPatch) -> Daemons:
    """The cluster as this process's Slurm, asked often."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm_cluster.environment[name])
    monkeypatch.setattr(ClusterEngine.__init__, "__defaults__", (1.0, SILENCE_S))
    return slurm_cluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A real Ray; the tests that need it are skipped where it cannot be started."""
    reason = real_ray.why_not()
    if reason is not None:
        pytest.skip(reason)
    with real_ray.cluster() as found:
        yield found


@pytest.fixture
def ray(ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """The cluster as this process's Ray, asked often."""
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray_cluster.address)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(RayEngine.__init__, "__defaults__", (1.0, SILENCE_S))
    return ray_cluster


CLUSTERS = ("slurm", "ray")


@pytest.fixture(params=["local", *(pytest.param(name, marks=pytest.mark.long) for name in CLUSTERS)])
def name(request: pytest.FixtureRequest) -> str:
    """Every engine in turn."""
    if request.param in CLUSTERS:
        request.getfixturevalue(request.param)
    return str(request.param)


@pytest.fixture(params=CLUSTERS)
def cluster_name(request: pytest.FixtureRequest) -> str:
    """Every engine whose jobs outlive the flow."""
    request.getfixturevalue(request.param)
    return str(request.param)


def a_flow_on(name: str) -> ClusterEngine:
    """Return the engine as another flow process would make it."""
    return SlurmEngine() if name == "slurm" else RayEngine(RaySettings())


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for `condition` to hold and return its value."""
    end = time.monotonic() + GENEROUS_S
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come true in {GENEROUS_S:.0f} s")


def marked(run_id: str) -> list[str]:
    """Every process of the run on any host of this machine, whatever node of a cluster it belongs to."""
    ids = [run_id, *(f"{run_id}.{node}" for node in range(4))]
    pids = {pid for found in ids for pid in proc.marked(found)}
    return [f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}" for pid in sorted(pids)]


def job_of(run: Run | Light) -> str:
    """Return the cluster's own name of a run's job."""
    (handle,) = (p for name in CLUSTERS if (p := run.paths.root / f"{name}.json").exists())
    return str(json.loads(handle.read_text())["job"])


def on_machines(run: Run, gpus: int = 1) -> Run:
    """Return the run with so many ranks on each machine of a cluster whose machines are all this one."""
    silence = {"CP007": "all machines are this machine"}
    validation = run.spec.validation.model_copy(update={"silence": silence})
    run.spec = run.spec.model_copy(update={"gpus": gpus, "validation": validation})
    return run


class Run:
    """One real training run of two CPU ranks, by the real tasks."""

    def __init__(self, spec: TrainingSpec, zygote: Path | None) -> None:
        self.spec = spec
        self.zygote = zygote
        self.run_id = f"test-{uuid.uuid4().hex[:12]}"

    @property
    def paths(self) -> RunPaths:
        return RunPaths.of(self.spec.output_dir, self.run_id)

    def prepared(self) -> LaunchPlan:
        """Everything up to the launch."""
        spec = self.spec
        hardware = tasks.detect_hardware.fn(spec.device, [spec.output_dir])
        data = tasks.prepare_dataset.fn(spec)
        plan = tasks.resolve_sharding_config.fn(spec, hardware, data)
        tasks.validate_strategy.fn(spec, hardware, plan)
        launch = tasks.write_temp_config.fn(spec, hardware, plan, self.run_id, data=data)
        if self.zygote is not None:
            launch = preloaded.forked(launch, self.zygote)
            self.paths.launch.write_text(launch.model_dump_json())  # where a job reads it
        return launch

    def attempt(self, watch: Watch | None = None, launch: LaunchPlan | None = None) -> TrainReport:
        """Make one attempt; `watch` runs beside it in a thread."""
        launch = launch or self.prepared()
        if watch is not None:
            threading.Thread(target=watch, args=(self, launch), daemon=True).start()
        try:
            return tasks.launch_distributed_train.fn(launch)
        except TrainingFailed:
            return TrainReport.load(self.paths.root)

    def wait_for(self, attempt: int, kind: str, step: int = 0) -> list[dict[str, Any]]:
        """Wait for an event of an attempt and return all that are there."""
        path = self.paths.attempt(attempt).events

        def found() -> list[dict[str, Any]]:
            events = tail_events(path).poll()
            return events if any(e["kind"] == kind and e.get("step", 0) >= step for e in events) else []

        events: list[dict[str, Any]] = until(found, f"{kind} of step {step} in attempt {attempt}")
        return events


Maker = Callable[..., Run]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Path]:
    """A process that has imported the training stack: the start takes most of a short run's time."""
    with preloaded.zygote() as socket:
        yield socket


@pytest.fixture(scope="session")
def make(
    parameters: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory, zygote: Path
) -> Maker:
    """Return a new run of `steps` steps that saves every `every`.

    Its ranks are forked from the zygote, unless torch elastic is asked for, which users have.
    """

    def build(
        engine_name: str,
        preset: str = "zero2",
        elastic: bool = False,
        steps: int = STEPS,
        every: int = EVERY,
        **launcher: Any,
    ) -> Run:
        values = parameters(preset, tmp_path_factory.mktemp("engines"), max_steps=steps)
        values["data"] |= {"max_length": 96}
        values["validation"] = {"deep": False}
        values["recovery"] = {"save_steps": every, "backoff_s": 0}
        values["launcher"] = {"engine": engine_name, "omp_num_threads": 1, "stop_budget_s": 25, **launcher}
        return Run(parse_spec(values), None if elastic else zygote)

    return build


@pytest.fixture(scope="session")
def undisturbed(make: Maker) -> TrainReport:
    """The local run that nothing happened to."""
    report = make("local").attempt()
    assert report.state == "completed", report.cause
    return report


def losses(report: TrainReport) -> list[tuple[int, float | None]]:
    return [(point.step, point.loss) for point in report.train]


class Light(Launch):
    """Ranks that only pretend to train, for what an engine does without them."""

    def on(self, engine_name: str, body: str, **changes: Any) -> tuple[Engine, LaunchPlan]:
        """Return the engine and a plan that is written where a job reads it."""
        plan = self.plan(body, engine=engine_name, cpus_per_node=1, **changes)
        self.paths.launch.write_text(plan.model_dump_json())
        return engine(plan), plan


@pytest.fixture
def light(tmp_path: Path) -> Iterator[Light]:
    """A run in a folder with a hostile name, which must leave nothing."""
    folder = tmp_path / 'it\'s a "bad" dir; echo $HOME 100%'
    folder.mkdir()
    case = Light(folder)
    yield case
    try:
        until(lambda: not marked(case.run_id), "no survivors")
    finally:
        proc.send([int(text.split(":")[0]) for text in marked(case.run_id)], 9)


@pytest.fixture(autouse=True)
def _few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
