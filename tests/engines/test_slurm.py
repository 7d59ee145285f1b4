"""What Slurm does to a job by itself: it starts it again, ends it, and gives it several machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from soup_flows.checkpoints import list_checkpoints, verify
from soup_flows.errors import Refused
from soup_flows.hooks import sweep_run
from soup_flows.launch.engines.slurm import SlurmEngine
from soup_flows.launch.outcome import classify
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.run import follow
from soup_flows.report import TrainReport
from tests.engines.cluster import Daemons
from tests.engines.conftest import Light, Maker, Run, losses, marked, until

pytestmark = [pytest.mark.ranks, pytest.mark.long]

SUBMIT = """
import sys
from soup_flows.launch.engines.slurm import SlurmEngine
from soup_flows.launch.plan import LaunchPlan
SlurmEngine().submit(LaunchPlan.model_validate_json(open(sys.argv[1]).read()))
"""


def job_of(run: Run | Light) -> str:
    return str(json.loads((run.paths.root / "slurm.json").read_text())["job"])


@pytest.mark.parametrize("ended", [False, True])
def test_the_next_start_of_a_flow_run_takes_its_job(
    ended: bool, slurm: Daemons, make: Maker, undisturbed: TrainReport, prefect_server: None
) -> None:
    """The flow died after it had submitted; its job still runs, or has finished, when the flow run starts again."""
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow_sync

    from soup_flows.flows import soup_train

    run = make("slurm")
    parameters = run.spec.model_dump(mode="json")
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(soup_train, parameters=parameters)
    run.run_id = str(flow_run.id)
    run.prepared()
    subprocess.run([sys.executable, "-c", SUBMIT, str(run.paths.launch)], check=True)
    job = job_of(run)
    if ended:
        until(
            lambda: "JobState=COMPLETED" in slurm.call("scontrol", "show", "job", "-o", job),
            "the end of the job",
        )
    report = run_flow_sync(soup_train, flow_run=flow_run, parameters=parameters)
    assert isinstance(report, TrainReport)
    assert (report.state, report.attempts, len(report.ledger)) == ("completed", 1, 1)
    assert losses(report) == losses(undisturbed)
    assert job_of(run) == job


def start_again_now(slurm: Daemons, job: str) -> None:
    """A requeued job waits two minutes by itself (BeginTime); let it begin."""
    until(lambda: "JobState=PENDING" in slurm.call("scontrol", "show", "job", "-o", job), "a requeued job")
    slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")


def test_a_preempted_job_goes_on_by_itself(slurm: Daemons, make: Maker, undisturbed: TrainReport) -> None:
    """`scontrol requeue` is what a preemption with PreemptMode=REQUEUE does to a job."""

    def requeue(run: Run, launch: LaunchPlan) -> None:
        run.wait_for(1, "checkpoint", 6)
        job = job_of(run)
        slurm.call("scontrol", "requeue", job)
        start_again_now(slurm, job)

    run = make("slurm")
    report = run.attempt(requeue)
    assert (report.state, report.attempts) == ("completed", 2), report.cause
    assert report.started_from >= 6
    assert losses(report) == losses(undisturbed)
    assert [(row.state, row.failure_class) for row in report.ledger] == [
        ("cancelled", "preempted"),
        ("completed", None),
    ]
    assert "slurm" in (run.paths.root / "slurm.log").read_text()


def test_before_the_time_limit_it_saves_and_is_started_again(
    slurm: Daemons, make: Maker, undisturbed: TrainReport
) -> None:
    """The signal of `--signal=B:TERM@...` reaches the batch shell alone; here it is sent by hand."""

    def near(run: Run, launch: LaunchPlan) -> None:
        run.wait_for(1, "metrics", 4)
        job = job_of(run)
        slurm.call("scancel", "--batch", "--signal=TERM", job)
        start_again_now(slurm, job)

    run = make("slurm")
    report = run.attempt(near)
    assert (report.state, report.attempts) == ("completed", 2), report.cause
    assert "saved at step" in report.ledger[0].cause
    assert report.ledger[0].steps_lost == 0
    assert losses(report) == losses(undisturbed)
    assert not run.paths.stop_request.exists()


@pytest.mark.parametrize("preset", ["zero2", "zero3", "full_shard"])
def test_two_machines(preset: str, slurm: Daemons, make: Maker) -> None:
    """One rank on each of two nodes computes what two ranks on one machine do."""
    wanted = make("local", preset).attempt()
    run = make("slurm", preset, elastic=True, slurm={"nodes": 2})
    silence = {"CP007": "both nodes are this machine"}
    validation = run.spec.validation.model_copy(update={"silence": silence})
    run.spec = run.spec.model_copy(update={"gpus": 1, "validation": validation})
    report = run.attempt()
    assert report.state == "completed", report.cause
    assert report.plan is not None
    assert (report.plan.nodes, report.plan.world_size) == (2, 2)
    assert losses(report) == losses(wanted)
    logs = {path.name for path in run.paths.attempt(1).logs.iterdir()}
    assert {"rank_0.log", "rank_1.log", "launcher.log", "launcher_node_1.log"} <= logs
    assert not any(name.startswith("node_") for name in logs)
    assert not marked(run.run_id)


def test_a_killed_rank_on_the_other_machine(slurm: Daemons, make: Maker) -> None:
    def kill(run: Run, launch: LaunchPlan) -> None:
        events = run.wait_for(1, "checkpoint", 3)
        os.kill(next(e["pid"] for e in events if e["kind"] == "started" and e["rank"] == 1), signal.SIGKILL)

    run = make("slurm", elastic=True, slurm={"nodes": 2})
    silence = {"CP007": "both nodes are this machine"}
    validation = run.spec.validation.model_copy(update={"silence": silence})
    run.spec = run.spec.model_copy(update={"gpus": 1, "validation": validation})
    report = run.attempt(kill)
    assert report.failure_class == "rank_killed", report.cause
    assert "rank 1" in report.cause
    assert not marked(run.run_id)
    kept = list_checkpoints(run.paths.checkpoints)
    assert kept
    assert not any(verify(folder, run.run_id) for folder in kept)


def test_what_slurm_ends_is_told_from_what_we_end(slurm: Daemons, light: Light) -> None:
    """A job that somebody cancels is not a preemption, which would be tried again."""
    found, plan = light.on("slurm", "ready()\ntime.sleep(600)\n")

    def cancel() -> None:
        light.ranks_ready()
        slurm.call("scancel", job_of(light))

    threading.Thread(target=cancel, daemon=True).start()
    outcome = follow(found, plan)
    verdict = classify(light.attempt, outcome.receipt)
    assert verdict.failure_class == "cancelled"
    assert "somebody cancelled" in verdict.cause


def test_a_queued_job_says_why_it_waits_and_leaves_when_cancelled(slurm: Daemons, light: Light) -> None:
    blocker = slurm.call(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600"
    )
    try:
        until(
            lambda: "JobState=RUNNING" in slurm.call("scontrol", "show", "job", "-o", blocker.strip()),
            "a blocker",
        )
        found, plan = light.on("slurm", "ready()\n")
        seen: list[tuple[str, str]] = []
        outcome = follow(
            found,
            plan,
            on_status=lambda status: seen.append((status.state, status.reason)),
            should_stop=lambda: "enough" if ("QUEUED", "Resources") in seen else None,
        )
        assert (outcome.reason, outcome.receipt["detail"]) == ("stopped", "enough")
        assert not (light.attempt.root / "ready_0").exists()
    finally:
        slurm.call("scancel", blocker.strip())


def test_a_dead_controller_is_no_end(slurm: Daemons, light: Light, monkeypatch: pytest.MonkeyPatch) -> None:
    found, plan = light.on("slurm", "ready()\ntime.sleep(600)\n")
    handle = found.submit(plan)
    light.ranks_ready()
    broken = light.folder / "slurm.conf"
    broken.write_text(
        Path(slurm.environment["SLURM_CONF"]).read_text().replace("SlurmctldPort=", "SlurmctldPort=1")
    )
    (light.folder / "cgroup.conf").touch()
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(broken))
        status = SlurmEngine(0.0).status(handle)
        assert (status.ended, "does not answer" in status.reason) == (False, True)
        with pytest.raises(
            Refused, match="ENGINE002"
        ):  # a second job would write into the first one's folder
            SlurmEngine().submit(plan)
    assert found.cancel(handle, "enough")["reason"] == "stopped"


def test_the_hook_of_a_cancelled_flow_ends_its_job(slurm: Daemons, light: Light) -> None:
    """The flow is dead, so that only the hook is left; a crash alone leaves the job to the next start."""
    from prefect.states import Cancelled, Crashed

    class FlowRun:
        id = light.run_id
        parameters: dict[str, Any] = {"output_dir": str(light.folder)}  # noqa: RUF012

    _, plan = light.on("slurm", "ready()\ntime.sleep(600)\n")
    subprocess.run([sys.executable, "-c", SUBMIT, str(light.paths.launch)], check=True)
    light.ranks_ready()
    assert SlurmEngine().attach(plan.paths) is not None
    crashed = Crashed()
    crashed.timestamp = crashed.timestamp.replace(
        year=2000
    )  # else the sweep of this host would end the ranks
    sweep_run(None, FlowRun(), crashed)
    assert SlurmEngine().attach(plan.paths) is not None
    sweep_run(None, FlowRun(), Cancelled())
    assert SlurmEngine().attach(plan.paths) is None
    assert not marked(light.run_id)
