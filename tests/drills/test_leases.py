"""Leases between real processes: disjoint, in line, named, and freed by any death of the holder."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from soup_flows import tasks
from soup_flows.attempt import free_devices, free_now, run_attempt
from soup_flows.errors import Refused, TrainingFailed
from soup_flows.hardware import RecordedProbe, detect
from soup_flows.launch import proc
from soup_flows.launch.devices import Device, core_slots, gpu_devices
from soup_flows.launch.leases import LEASE_DIR, holder, leased
from soup_flows.launch.plan import LeaseSettings
from soup_flows.report import TrainReport
from soup_flows.spec import parse_spec
from tests.launch.conftest import Launch, launch, until  # noqa: F401 (a fixture)

pytestmark = pytest.mark.ranks

HOLDER = """
import pathlib, sys
from soup_flows.launch.devices import Device
from soup_flows.launch.leases import leased
count, run_id, folder, names = sys.argv[1:]
with leased(
    int(count), lambda: [Device(n, "slot") for n in names.split(",")], run_id, folder=pathlib.Path(folder),
    on_wait=lambda text: print("wait", text, flush=True),
) as lease:
    print("got", ",".join(lease.devices), flush=True)
    sys.stdin.read()
print("released", flush=True)
"""

FLOW = """
import pathlib, sys
from soup_flows.launch.devices import Device
from soup_flows.launch.leases import leased
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.run import run
plan = LaunchPlan.model_validate_json(pathlib.Path(sys.argv[1]).read_text())
with leased(1, lambda: [Device("gpu-0", "slot")], plan.run_id, folder=pathlib.Path(sys.argv[1]).parent) as lease:
    run(plan, lease_fds=lease.fds)
"""

Holder = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Holder]:
    """Start processes that want `count` of the named devices; they end when their stdin closes."""
    started: list[subprocess.Popen[str]] = []

    def start(count: int, run_id: str, names: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(count), run_id, str(tmp_path), names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def take(count: int, devices: list[Device], **how: Any) -> None:
    """Lease and release."""
    with leased(count, lambda: devices, "run-of-the-test", **how):
        pass


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_two_runs_are_disjoint_and_a_third_waits_for_a_named_one(hold: Holder, tmp_path: Path) -> None:
    first, second = hold(2, "run-a", "g0,g1,g2,g3"), hold(2, "run-b", "g0,g1,g2,g3")
    got = [says(first), says(second)]
    taken = [set(text.removeprefix("got ").split(",")) for text in got]
    assert taken[0] | taken[1] == {"g0", "g1", "g2", "g3"}
    third = hold(1, "run-c", "g0,g1,g2,g3")
    waiting = says(third)
    assert f"g0 is leased by run {'run-a' if 'g0' in taken[0] else 'run-b'} (process " in waiting
    assert str(second.pid) in waiting
    second.send_signal(signal.SIGKILL)
    second.wait()
    assert says(third).removeprefix("got ") in taken[1]
    found = holder(tmp_path, min(taken[0]))
    assert found is not None
    assert found["run_id"] == "run-a"


def test_a_waiting_run_is_not_overtaken_but_blocks_only_what_it_wants(hold: Holder) -> None:
    first = hold(1, "run-a", "g0,g1")
    assert says(first) == "got g0"
    older = hold(2, "run-b", "g0,g1")
    assert "g0 is leased by run run-a" in says(older)
    younger, elsewhere = hold(1, "run-c", "g0,g1"), hold(1, "run-d", "g7")
    assert says(elsewhere) == "got g7"
    assert "g1 is next for run run-b" in says(younger)
    first.communicate("")
    assert says(older) == "got g0,g1"
    older.kill()
    older.wait()
    while (text := says(younger)).startswith("wait"):
        pass
    assert text == "got g0"


def test_a_waiting_run_that_dies_leaves_the_line(hold: Holder, tmp_path: Path) -> None:
    first = hold(1, "run-a", "g0,g1")
    says(first)
    dead = hold(2, "run-b", "g0,g1")
    says(dead)
    dead.kill()
    dead.wait()
    assert says(hold(1, "run-c", "g0,g1")) == "got g1"
    assert not list(tmp_path.glob("waiting-*"))


def test_a_fork_of_the_holder_does_not_keep_a_released_lease(tmp_path: Path) -> None:
    with leased(1, lambda: [Device("g0", "slot")], "run-a", folder=tmp_path):
        child = os.fork()
        if child == 0:
            signal.pause()
        assert holder(tmp_path, "g0") is not None
    assert holder(tmp_path, "g0") is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_lease_outlives_the_flow_until_its_ranks_are_gone(launch: Launch) -> None:  # noqa: F811
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\nwhile True: time.sleep(0.2)\n"
    flow = launch.hold(launch.plan(deaf, stop_budget_s=3), FLOW)
    ranks = launch.ranks_ready()
    flow.kill()
    flow.wait()
    seen_held = 0
    while True:
        held = holder(launch.folder, "gpu-0") is not None
        if not any(proc.parent_of(pid) for pid in ranks):
            break
        assert held
        seen_held += 1
    assert seen_held
    until(lambda: holder(launch.folder, "gpu-0") is None, "a free device")


def test_sick_and_foreign_devices(tmp_path: Path) -> None:
    sick = Device("g0", "slot", sick="2 uncorrected ECC memory errors")
    with pytest.raises(Refused, match=r"g0 2 uncorrected ECC.*use gpus=1"):
        take(2, [sick, Device("g1", "slot")], folder=tmp_path)
    said: list[str] = []
    used = Device("g1", "slot", occupied="process 4711 (2048 MiB)")
    with pytest.raises(TrainingFailed) as failed:
        take(1, [sick, used], folder=tmp_path, max_wait_s=0.1, on_wait=said.append)
    assert failed.value.failure_class == "timeout"
    assert "g1 is used without a lease by process 4711" in failed.value.cause
    assert said
    with leased(1, lambda: [sick, used, Device("g2", "slot")], "run-a", folder=tmp_path) as lease:
        assert lease.devices == ("g2",)
        assert free_devices([sick, used, Device("g2", "slot"), Device("g3", "slot")], tmp_path) == {"g3"}


def test_runs_on_one_divided_gpu_get_different_slices(tmp_path: Path) -> None:
    probe = RecordedProbe(Path(__file__).parents[1] / "data/hardware/mig-slices.json")
    hardware = detect("cuda", probe=probe, environ={})
    first, other = hardware.gpus[0], hardware.unused[0]
    assert [device.id for device in gpu_devices(hardware.gpus, hardware.unused)] == [first.uuid]
    alike = other.model_copy(update={"name": first.name})
    slices = gpu_devices(hardware.gpus, [alike, *hardware.unused[1:]])
    with leased(1, lambda: slices, "run-a", folder=tmp_path) as mine:
        assert mine.devices == (first.uuid,)
        with leased(1, lambda: slices, "run-b", folder=tmp_path) as others:
            assert others.devices == (other.uuid,)
            assert other.uuid.startswith("MIG-")


def test_auto_takes_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEASE_DIR, str(tmp_path))
    probe = RecordedProbe(Path(__file__).parents[1] / "data/hardware/8xh100-foreign-processes.json")
    hardware = detect("cuda", probe=probe, environ={})
    spec = parse_spec({"model": "m", "dataset": "d"})
    devices = gpu_devices(hardware.gpus)
    good = [device.id for device in devices if not device.sick and not device.occupied]
    with leased(2, lambda: devices, "run-a", folder=tmp_path) as taken:
        free = [gpu.uuid for gpu in free_now(spec, hardware).gpus]
    assert set(free) == set(good) - set(taken.devices)
    assert len(free) == len(good) - 2 > 0
    assert free_now(parse_spec({"model": "m", "dataset": "d", "gpus": 4}), hardware) == hardware


def test_limits_of_the_spec_reach_the_supervisor(
    parameters: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    limits = {"timeout_min": 0.5, "stall_floor_s": 77, "stop_budget_s": 9, "lease": "on", "max_wait_min": 2}
    values = parameters("ddp", tmp_path) | {"launcher": limits}
    spec = parse_spec(values)
    hardware = tasks.detect_hardware.fn(spec.device, [spec.output_dir])
    plan = tasks.write_temp_config.fn(spec, hardware, tasks.resolve_sharding_config.fn(spec, hardware))
    assert (plan.timeout_s, plan.stall.floor_s, plan.stop_budget_s) == (30, 77, 9)
    assert plan.lease == LeaseSettings(kind="core", max_wait_s=120)


def test_stopped_while_waiting(hold: Holder, tmp_path: Path) -> None:
    says(hold(1, "run-a", "g0"))
    asked = "the server says the run is Cancelling"
    with pytest.raises(TrainingFailed, match=asked):
        take(1, [Device("g0", "slot")], folder=tmp_path, should_stop=lambda: asked)
    assert not list(tmp_path.glob("waiting-*"))


def test_an_attempt_leases_and_says_so(
    launch: Launch,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(LEASE_DIR, str(launch.folder / "locks"))
    plan = launch.plan("ready()\n", ranks=1, lease=LeaseSettings(kind="core", max_wait_s=0))
    with caplog.at_level(logging.INFO):
        outcome = run_attempt(plan, logging.getLogger("run"), lambda: None)
    assert outcome.reason == "exited"
    core = min(os.sched_getaffinity(0))
    assert f"Leased core-{core}" in caplog.text
    assert f'"core-{core}"' in launch.attempt.devices.read_text()
    assert holder(launch.folder / "locks", f"core-{core}") is None


def test_a_run_that_waited_too_long_says_for_whom(
    parameters: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LEASE_DIR, str(tmp_path / "locks"))
    values = parameters("ddp", tmp_path) | {"launcher": {"lease": "on", "max_wait_min": 0}}
    cores = core_slots()
    values["gpus"] = len(cores)
    spec = parse_spec(values)
    hardware = tasks.detect_hardware.fn(spec.device, [spec.output_dir])
    plan = tasks.write_temp_config.fn(spec, hardware, tasks.resolve_sharding_config.fn(spec, hardware))
    with leased(1, lambda: cores, "the-other-run"), pytest.raises(TrainingFailed) as failed:
        tasks.launch_distributed_train.fn(plan)
    assert failed.value.failure_class == "timeout"
    assert f"{cores[0].id} is leased by run the-other-run" in failed.value.cause
    report = TrainReport.load(failed.value.run_dir)
    assert (report.state, report.failure_class) == ("failed", "timeout")
    assert proc.marked(plan.run_id) == []


def test_a_launch_that_cannot_begin_is_a_failure(
    parameters: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parse_spec(parameters("ddp", tmp_path))
    hardware = tasks.detect_hardware.fn(spec.device, [spec.output_dir])
    plan = tasks.write_temp_config.fn(spec, hardware, tasks.resolve_sharding_config.fn(spec, hardware))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        tasks.launch_distributed_train.fn(plan)
    report = TrainReport.load(plan.run_dir)
    assert (report.state, report.failure_class) == ("failed", "unknown")
    assert "FileNotFoundError" in report.cause
