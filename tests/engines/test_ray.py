"""What Ray does to a job, or leaves to its entry: machines that go away and come back, waiting, a stop by others."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import uuid
from collections.abc import Iterator

import pytest

from soup_flows.errors import Refused
from soup_flows.launch.engines.ray import RayEngine, waiting
from soup_flows.launch.engines.ray_http import Dashboard
from soup_flows.launch.outcome import classify
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.run import follow
from soup_flows.ray_settings import RaySettings
from soup_flows.report import TrainReport
from tests.engines.conftest import Light, Maker, Run, job_of, losses, marked, on_machines, until
from tests.engines.ray_cluster import CPUS, HEAD, SECOND, RayCluster

pytestmark = [pytest.mark.ranks, pytest.mark.long]


@pytest.fixture
def whole(ray: RayCluster) -> Iterator[RayCluster]:
    """The cluster, which has all its machines again after the test."""
    yield ray
    with contextlib.suppress(KeyError):
        if ray.machines[SECOND].poll() is None:
            return
    ray.start(SECOND)
    ray.until_alive(HEAD, SECOND)


def test_a_lost_machine_is_waited_for(whole: RayCluster, make: Maker, undisturbed: TrainReport) -> None:
    """Power off the second machine, see the job wait, and bring it back: the entry makes the next attempt."""
    said: list[str] = []

    def power_off(run: Run, launch: LaunchPlan) -> None:
        run.wait_for(1, "checkpoint", 6)
        whole.power_off(SECOND)
        said.append(until(lambda: waiting(run.paths), "a job that waits"))
        whole.start(SECOND)

    run = on_machines(make("ray", elastic=True, ray={"nodes": 2}))
    report = run.attempt(power_off)
    assert (report.state, report.attempts) == ("completed", 2), report.cause
    assert report.started_from >= 6
    assert losses(report) == losses(undisturbed)
    assert [(row.state, row.failure_class) for row in report.ledger] == [
        ("cancelled", "node_lost"),
        ("completed", None),
    ]
    assert said[0] == "2 machine(s) with 1 CPU are asked for; machines with room at present: 1"
    assert not marked(run.run_id)


@pytest.mark.parametrize("preset", ["full_shard", "zero2"])
def test_fewer_machines_and_more_again(preset: str, whole: RayCluster, make: Maker) -> None:
    """The run goes on with one machine when the other is lost, and grows back; the global batch is kept.

    The one rank is held until the job has seen that the other machine is there again: its steps might be over before.
    """
    long = {"steps": 200, "every": 20}
    wanted = make("local", preset, **long).attempt()

    def power_off(run: Run, launch: LaunchPlan) -> None:
        run.wait_for(1, "checkpoint", 20)
        whole.power_off(SECOND)
        alone = next(e["pid"] for e in run.wait_for(2, "started") if e["kind"] == "started")
        os.kill(alone, signal.SIGSTOP)
        whole.start(SECOND)
        until(run.paths.stop_request.exists, "a request to save, since there is room for more")
        os.kill(alone, signal.SIGCONT)

    ray = {"nodes": 2, "min_nodes": 1, "patience_s": 3}
    run = on_machines(make("ray", preset, elastic=True, ray=ray, **long))
    report = run.attempt(power_off)
    assert (report.state, report.attempts) == ("completed", 3), report.cause
    assert [row.failure_class for row in report.ledger] == ["node_lost", "preempted", None]
    assert "more machines" in report.ledger[1].cause
    assert (report.ledger[0].from_step, report.ledger[1].from_step) == (0, 20)
    assert report.ledger[1].steps_lost == 0
    assert report.plan is not None
    assert (report.plan.world_size, report.plan.batch.global_batch_size) == (2, 16)
    one, other = dict(losses(report)), dict(losses(wanted))
    assert set(one) == set(other)
    assert all(abs((one[step] or 0) - (other[step] or 0)) < 1e-3 for step in other)
    assert not marked(run.run_id)


def test_a_queued_job_says_why_it_waits_and_leaves_when_cancelled(ray: RayCluster, light: Light) -> None:
    """Other jobs hold all cores; this one waits for them."""
    dashboard = Dashboard(RaySettings(), os.environ)
    blockers = [f"blocker-{uuid.uuid4().hex}" for _ in ray.machines]
    try:
        for name in blockers:
            body = {"entrypoint": "exec sleep 600", "submission_id": name, "entrypoint_num_cpus": CPUS}
            assert dashboard.call("POST", "/api/jobs/", body)[0] == 200
        until(
            lambda: all(dashboard.json("GET", f"/api/jobs/{n}")["status"] == "RUNNING" for n in blockers),
            "blockers",
        )
        found, plan = light.on("ray", "ready()\n")
        seen: list[tuple[str, str]] = []
        outcome = follow(
            found,
            plan,
            on_status=lambda status: seen.append((status.state, status.reason)),
            should_stop=lambda: "enough" if any("with room" in r for s, r in seen) else None,
        )
        assert (outcome.reason, outcome.receipt["detail"]) == ("stopped", "enough")
        assert {state for state, reason in seen if "with room" in reason} == {"QUEUED"}
        assert not (light.attempt.root / "ready_0").exists()
    finally:
        for name in blockers:
            dashboard.call("POST", f"/api/jobs/{name}/stop")


def test_what_others_end_is_told(ray: RayCluster, light: Light) -> None:
    """A job that somebody stops with `ray job stop` was cancelled, and its ranks had the time to save."""
    found, plan = light.on("ray", "ready()\ntime.sleep(600)\n")

    def stop() -> None:
        light.ranks_ready()
        Dashboard(RaySettings(), os.environ).call("POST", f"/api/jobs/{job_of(light)}/stop")

    threading.Thread(target=stop, daemon=True).start()
    outcome = follow(found, plan)
    verdict = classify(light.attempt, outcome.receipt)
    assert verdict.failure_class == "cancelled"
    assert "somebody cancelled" in verdict.cause
    assert (light.attempt.root / "receipt.json").exists()


def test_a_dead_dashboard_is_no_end(ray: RayCluster, light: Light) -> None:
    found, plan = light.on("ray", "ready()\ntime.sleep(600)\n")
    handle = found.submit(plan)
    light.ranks_ready()
    deaf = RayEngine(RaySettings(address="http://127.0.0.1:9"), 0.0, silence_s=1.0)
    status = deaf.status(handle)
    assert (status.ended, "does not answer" in status.reason) == (False, True)
    with pytest.raises(Refused, match="ENGINE004"):  # a second job would write into the first one's folder
        deaf.submit(plan)
    assert found.cancel(handle, "enough")["reason"] == "stopped"
