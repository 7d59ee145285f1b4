"""Runs that are killed, told to stop, and resumed: real processes, started through the real tasks."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks import preloaded
from soup_flows import tasks
from soup_flows.attempts import reconcile
from soup_flows.errors import TrainingFailed
from soup_flows.launch.events import tail_events
from soup_flows.launch.plan import LaunchPlan
from soup_flows.ledger import Change
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from soup_flows.spec import TrainingSpec, parse_spec

STEPS, EVERY = 8, 2
HOOKS = Path(__file__).with_name("hooks")
Watch = Callable[["Case", LaunchPlan], None]


@dataclass
class Case:
    """One run directory and what was asked of it."""

    spec: TrainingSpec
    zygote: Path
    """Socket of the process that forks the ranks."""
    run_id: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:12]}")
    reports: list[TrainReport] = field(default_factory=list)

    @property
    def paths(self) -> RunPaths:
        return RunPaths.of(self.spec.output_dir, self.run_id)

    def attempt(
        self, watch: Watch | None = None, change: Change | None = None, hook: str | None = None
    ) -> TrainReport:
        """Make one attempt; `watch` runs beside it in a thread, the script `hook` in each rank."""
        spec = (change or Change()).apply(self.spec)
        hardware = tasks.detect_hardware.fn(spec.device, [spec.output_dir])
        plan = tasks.resolve_sharding_config.fn(spec, hardware)
        problems = tasks.validate_strategy.fn(spec, hardware, plan)
        launch = tasks.write_temp_config.fn(spec, hardware, plan, self.run_id, change)
        launch = preloaded.forked(launch, self.zygote, HOOKS / f"{hook}.py" if hook else None)
        if watch is not None:
            threading.Thread(target=watch, args=(self, launch), daemon=True).start()
        try:
            report = tasks.launch_distributed_train.fn(launch, problems, change)
        except TrainingFailed:
            report = TrainReport.load(self.paths.root)
        self.reports.append(report)
        return report

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.paths.checkpoints.glob("checkpoint-*"))


def losses(report: TrainReport) -> list[tuple[int, float | None]]:
    return [(point.step, point.loss) for point in report.train]


def assert_same_weights(one: TrainReport, other: TrainReport) -> None:
    """Every tensor of the final models is equal bit for bit."""
    assert one.model is not None
    assert other.model is not None
    (file,) = Path(one.model).glob("*model.safetensors")
    mine, theirs = load_file(file), load_file(Path(other.model) / file.name)
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not mine[name].equal(theirs[name])]
    assert not different, f"{len(different)} of {len(mine)} tensors differ, {different[0]} first"


def events_of(launch: LaunchPlan) -> list[dict[str, Any]]:
    return tail_events(launch.attempt_paths.events).poll()


def wait_for(launch: LaunchPlan, kind: str, step: int = 0) -> None:
    """Wait for an event of this attempt, while it lasts."""
    while not launch.attempt_paths.receipt.exists():
        if any(e["kind"] == kind and e.get("step", 0) >= step for e in events_of(launch)):
            return
        time.sleep(0.01)


def kill_a_rank(launch: LaunchPlan) -> None:
    pids = [e["pid"] for e in events_of(launch) if e["kind"] == "started"]
    os.kill(random.choice(pids), signal.SIGKILL)


def kill_after(step: int, delay_s: float = 0.0) -> Watch:
    """SIGKILL a rank `delay_s` seconds after it logged `step`."""

    def watch(_: Case, launch: LaunchPlan) -> None:
        wait_for(launch, "metrics", step)
        time.sleep(delay_s)
        kill_a_rank(launch)

    return watch


def kill_in_save(step: int, delay_s: float = 0.0) -> Watch:
    """SIGKILL a rank `delay_s` seconds after the save of `step` began."""

    def watch(case: Case, launch: LaunchPlan) -> None:
        staging = case.paths.checkpoints / ".saving" / f"checkpoint-{step}"
        while not staging.exists() and not launch.attempt_paths.receipt.exists():
            time.sleep(0.001)
        time.sleep(delay_s)
        kill_a_rank(launch)

    return watch


def reconciled(case: Case) -> list[str]:
    rows = reconcile(case.paths, case.spec.recovery)
    return [f"{row.state}: {row.failure_class}" for row in rows]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


Maker = Callable[..., Case]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Path]:
    """A process that has imported the training stack."""
    with preloaded.zygote() as socket:
        yield socket


@pytest.fixture(scope="session")
def case(
    parameters: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory, zygote: Path
) -> Maker:
    """Return a new case: a run of 8 steps that saves every second one."""

    def make(preset: str = "ddp", **changes: Any) -> Case:
        values = parameters(preset, tmp_path_factory.mktemp("recovery"), max_steps=STEPS)
        values["data"] = {"max_length": 96}
        values["validation"] = {"deep": False}
        values["recovery"] = {"save_steps": EVERY, "backoff_s": 0}
        for name, value in changes.items():
            values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
        return Case(parse_spec(values), zygote)

    return make


@pytest.fixture(scope="session")
def undisturbed(case: Maker) -> Callable[..., Case]:
    """Return a finished, never interrupted run of a preset; each is made once a session."""
    done: dict[str, Case] = {}

    def get(preset: str, **changes: Any) -> Case:
        key = json.dumps([preset, changes], sort_keys=True)
        if key not in done:
            done[key] = case(preset, **changes)
            assert done[key].attempt().state == "completed"
        return done[key]

    return get
