"""A dashboard or a controller that does not answer: for a while, for ever, and while the run goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from soup_flows.errors import ClusterSilent, Refused
from soup_flows.launch import proc
from soup_flows.launch.engines import Engine, Handle, Status, ray_http, slurm_commands
from soup_flows.launch.engines.ray import RayEngine
from soup_flows.launch.engines.slurm import SlurmEngine
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.run import follow
from soup_flows.paths import RunPaths, write_json
from soup_flows.ray_settings import RaySettings
from soup_flows.report import TrainReport
from tests.engines.cluster import Daemons
from tests.engines.conftest import Light, Maker, Run, job_of, losses, marked
from tests.engines.proxy import Mode, Proxy, proxy
from tests.engines.ray_cluster import RayCluster

REAL = [pytest.mark.ranks, pytest.mark.long]


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_http, "ANSWER_S", 0.3)


def a_run(folder: Path) -> Handle:
    """A run whose job was submitted before the dashboard fell silent."""
    paths = RunPaths.of(folder, "run-1").create()
    paths.attempt(1).root.mkdir()
    handle = Handle(engine="ray", run_id="run-1", run_dir=str(paths.root), job="run-1.1")
    write_json(paths.root / "ray.json", handle.model_dump())
    return handle


def ask_for_ever(engine: Engine, handle: Handle) -> None:
    while True:
        engine.status(handle)


def test_a_dashboard_that_never_answers_is_waited_for_within_bounds(tmp_path: Path) -> None:
    """It accepts and says nothing; signs of life of the ranks put the end off."""
    handle = a_run(tmp_path)
    beats = handle.paths.attempt(1).root / "heartbeat"
    beats.mkdir()
    with proxy(mode="mute") as mute:
        found = RayEngine(RaySettings(address=mute.address), 0.0, silence_s=1.2)
        for step in range(6):  # longer than the bound
            (beats / "rank_0").write_text(f"{step} train")
            status = found.status(handle)
            assert (status.ended, "does not answer" in status.reason) == (False, True)
        with pytest.raises(ClusterSilent) as silent:
            ask_for_ever(found, handle)
        with pytest.raises(Refused, match="ENGINE004"):
            found.attach(handle.paths)
        assert mute.muted > 6
    assert mute.address in silent.value.cause
    assert "Ray job run-1.1 may still be there" in silent.value.cause
    assert "Start the same run again" in silent.value.advice
    assert "ray status" in silent.value.advice


def test_a_result_needs_no_dashboard(tmp_path: Path) -> None:
    handle = a_run(tmp_path)
    attempt = handle.paths.attempt(1)
    with proxy(mode="mute") as mute:
        found = RayEngine(RaySettings(address=mute.address), 0.0)
        write_json(attempt.result, {"finished": True})
        assert not found.status(handle).ended  # its processes may still be ending
        write_json(attempt.receipt, {"reason": "exited"})
        assert found.status(handle).state == "SUCCEEDED"


def test_an_answer_that_trickles_in_is_bounded() -> None:
    """Each part comes in time, and the whole never does."""
    with proxy(mode="trickle") as slow, pytest.raises(ray_http.Unanswered, match="not all of them"):
        ray_http.Dashboard(RaySettings(address=slow.address), {}).call("GET", "/api/jobs/")


def block(way: Proxy, mode: Mode) -> None:
    """Let nothing through, which shows soon."""
    way.mode, ray_http.ANSWER_S = mode, 2.0


def unblock(way: Proxy) -> None:
    way.mode, ray_http.ANSWER_S = "forward", 30.0


class TestRealRay:
    """With a real job behind a proxy that can be blocked."""

    pytestmark = REAL

    @pytest.fixture
    def way(self, ray: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
        monkeypatch.setattr(ray_http, "ANSWER_S", 30.0)  # a new job takes a busy machine some seconds
        with proxy(ray.dashboard, ray.port + 1) as found:
            monkeypatch.setenv("RAY_API_SERVER_ADDRESS", found.address)
            yield found

    def test_a_short_absence_fails_nothing(self, way: Proxy, light: Light) -> None:
        found, plan = light.on("ray", "ready()\ntime.sleep(600)\n")
        said: list[Status] = []

        def enough() -> str | None:
            ready = (light.attempt.root / "ready_1").exists()
            away = [status.reason for status in said if "does not answer" in status.reason]
            if ready and not away:
                block(way, "hang up")
            elif len(away) == 1:
                block(way, "mute")
            elif away:
                unblock(way)
            return "enough" if len(away) > 1 and said[-1].reason == "" else None

        outcome = follow(found, plan, on_status=said.append, should_stop=enough)
        assert (outcome.reason, outcome.receipt["detail"]) == ("stopped", "enough")
        assert not marked(light.run_id)

    def test_a_dashboard_that_stays_away_does_not_cost_the_result(
        self, way: Proxy, make: Maker, undisturbed: TrainReport
    ) -> None:
        def go_mute(run: Run, launch: LaunchPlan) -> None:
            run.wait_for(1, "checkpoint", 3)
            block(way, "mute")

        report = make("ray", silence_s=200).attempt(go_mute)
        assert (report.state, report.attempts) == ("completed", 1), report.cause
        assert losses(report) == losses(undisturbed)

    def test_the_next_start_takes_the_job_of_a_silent_cluster(
        self, way: Proxy, make: Maker, undisturbed: TrainReport, prefect_server: None
    ) -> None:
        """The ranks stand still too, so that nothing shows whether the run lives; then all is well again."""
        from prefect.client.orchestration import get_client
        from prefect.flow_engine import run_flow_sync
        from prefect.states import AwaitingRetry

        from soup_flows.flows import soup_train

        run = make("ray", silence_s=6)
        parameters = run.spec.model_dump(mode="json")
        frozen: list[int] = []

        def freeze() -> None:
            run.wait_for(1, "checkpoint", 3)
            frozen.extend(proc.send(proc.marked(run.run_id), signal.SIGSTOP))
            block(way, "mute")

        with get_client(sync_client=True) as client:
            flow_run = client.create_flow_run(soup_train, parameters=parameters)
            run.run_id = str(flow_run.id)
            threading.Thread(target=freeze, daemon=True).start()
            try:
                with pytest.raises(ClusterSilent, match="may still be there"):
                    run_flow_sync(soup_train, flow_run=flow_run, parameters=parameters)
            finally:
                for pid in frozen:
                    os.kill(pid, signal.SIGCONT)
            silent = TrainReport.load(run.paths.root)
            assert (silent.state, silent.failure_class, silent.ledger) == ("failed", "cluster_silent", ())
            job = job_of(run)
            unblock(way)
            client.set_flow_run_state(flow_run.id, AwaitingRetry(), force=True)
            flow_run = client.read_flow_run(flow_run.id)
        report = run_flow_sync(soup_train, flow_run=flow_run, parameters=parameters)
        assert isinstance(report, TrainReport)
        assert (report.state, report.attempts, job_of(run)) == ("completed", 1, job), report.cause
        assert losses(report) == losses(undisturbed)


class TestRealSlurm:
    """The same with Slurm's commands, which wait for an answer themselves."""

    pytestmark = REAL

    def test_a_controller_that_never_answers(
        self, slurm: Daemons, light: Light, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slurm_commands, "ANSWER_S", 2.0)
        found, plan = light.on("slurm", "ready()\ntime.sleep(600)\n")
        handle = found.submit(plan)
        light.ranks_ready()
        deaf = SlurmEngine(0.0, silence_s=3.0)
        with proxy(mode="mute") as mute, monkeypatch.context() as patch:
            patch.setenv("SLURM_CONF", str(_another_port(slurm, light.folder, mute.port)))
            with pytest.raises(ClusterSilent, match="Slurm job") as silent:
                ask_for_ever(deaf, handle)
            assert mute.muted
        assert silent.value.failure_class == "cluster_silent"
        assert "scontrol ping" in silent.value.advice
        monkeypatch.setattr(slurm_commands, "ANSWER_S", 30.0)
        assert found.attach(light.paths) == handle
        assert found.cancel(handle, "enough")["reason"] == "stopped"


def _another_port(slurm: Daemons, folder: Path, port: int) -> Path:
    lines = Path(slurm.environment["SLURM_CONF"]).read_text().splitlines()
    config = folder / "slurm.conf"
    config.write_text(
        "\n".join(f"SlurmctldPort={port}" if "SlurmctldPort=" in line else line for line in lines)
    )
    (folder / "cgroup.conf").touch()
    (folder / "gres.conf").touch()
    return config
