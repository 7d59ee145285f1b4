"""What Slurm does to a job by itself: it starts it again, ends it, and gives it several machines."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from soup_flows.errors import Refused
from soup_flows.launch.engines.slurm import SlurmEngine
from soup_flows.launch.outcome import classify
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.run import follow
from soup_flows.report import TrainReport
from tests.engines.cluster import Daemons
from tests.engines.conftest import Light, Maker, Run, job_of, losses, until

pytestmark = [pytest.mark.ranks, pytest.mark.long]


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
            SlurmEngine(silence_s=1.0).submit(plan)
    assert found.cancel(handle, "enough")["reason"] == "stopped"
