"""What every engine has to do alike: one suite, for this machine, a real Slurm and a real Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from soup_flows.attempts import reconcile
from soup_flows.checkpoints import list_checkpoints, verify
from soup_flows.errors import Refused
from soup_flows.launch.engines import Handle
from soup_flows.launch.outcome import classify
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.run import follow
from soup_flows.report import TrainReport
from soup_flows.stop import stop
from tests.engines.conftest import STEPS, Light, Maker, Run, a_flow_on, losses, marked, until

pytestmark = pytest.mark.ranks
LONG = pytest.mark.long
REFUSED = {"local": "ENGINE001", "slurm": "ENGINE003", "ray": "ENGINE006"}

FLOW = """
import pathlib, sys
from soup_flows import tasks
from soup_flows.launch.plan import LaunchPlan
tasks.launch_distributed_train.fn(LaunchPlan.model_validate_json(pathlib.Path(sys.argv[1]).read_text()))
"""


@LONG
def test_equal_loss(name: str, make: Maker, undisturbed: TrainReport) -> None:
    """Under torch elastic, as users have it; the local run it is compared with is another start of ranks."""
    run = make(name, elastic=True)
    report = run.attempt()
    assert report.state == "completed", report.cause
    assert losses(report) == losses(undisturbed)
    assert report.eval_loss == undisturbed.eval_loss
    assert not marked(run.run_id)


@LONG
def test_a_killed_rank_recovers(name: str, make: Maker, undisturbed: TrainReport) -> None:
    def kill(run: Run, launch: LaunchPlan) -> None:
        events = run.wait_for(1, "checkpoint", 6)
        os.kill(next(e["pid"] for e in events if e["kind"] == "started" and e["rank"] == 1), signal.SIGKILL)

    run = make(name)
    killed = run.attempt(kill)
    assert (killed.failure_class, "rank 1" in killed.cause) == ("rank_killed", True), killed.cause
    resumed = run.attempt()
    assert (resumed.state, resumed.attempts) == ("completed", 2), resumed.cause
    assert resumed.started_from >= 6
    assert losses(resumed) == losses(undisturbed)
    assert [row.failure_class for row in resumed.ledger] == ["rank_killed", None]


@LONG
def test_cancel_leaves_nothing_and_a_good_checkpoint(name: str, make: Maker) -> None:
    def ask(run: Run, launch: LaunchPlan) -> None:
        run.wait_for(1, "checkpoint", 3)
        stop(run.paths.root)

    run = make(name)
    report = run.attempt(ask)
    assert (report.state, report.failure_class) == ("cancelled", "cancelled"), report.cause
    assert "on request" in report.cause
    assert not marked(run.run_id)
    kept = list_checkpoints(run.paths.checkpoints)
    assert kept
    assert not any(verify(folder, run.run_id) for folder in kept)
    assert not list(run.paths.temp.glob("ds_config*"))


@LONG
def test_an_exception_is_told_in_its_own_words_and_rank(name: str, light: Light) -> None:
    found, plan = light.on(
        name, "fail(ValueError('seventeen sheep')) if me == 1 else time.sleep(600)\n", elastic=True
    )
    outcome = follow(found, plan)
    verdict = classify(light.attempt, outcome.receipt)
    assert "seventeen sheep" in verdict.cause
    assert "rank 1" in verdict.cause
    assert verdict.failure_class == "code_error"
    handle = Handle(engine=plan.engine, run_id=light.run_id, run_dir=str(light.paths.root), job="0")
    assert any("seventeen sheep" in line.text for line in found.logs(handle, 400))


def test_submitting_twice_starts_once(name: str, light: Light) -> None:
    found, plan = light.on(name, "ready()\ntime.sleep(600)\n")
    first = found.submit(plan)
    assert found.submit(plan) == first == found.attach(light.paths)
    assert Handle.model_validate_json(first.model_dump_json()) == first
    light.ranks_ready()
    assert found.status(first).state == "RUNNING"
    receipt = found.cancel(first, "enough")
    assert (receipt["reason"], receipt["detail"], receipt["survivors"]) == ("stopped", "enough", [])
    assert found.cancel(first, "again") == receipt
    assert not marked(light.run_id)
    assert until(lambda: found.status(first).ended, "an end")
    assert found.status(first).state == "CANCELLED"
    assert found.attach(light.paths) is None


@LONG
def test_ranks_without_a_result_are_no_success(name: str, light: Light) -> None:
    found, plan = light.on(name, "ready()\n")
    handle = found.submit(plan)
    until(lambda: found.status(handle, 1.0).ended, "an end")
    assert found.status(handle).state == "FAILED"
    assert found.cancel(handle, "")["exit_code"] == 0


def test_an_infeasible_size_is_refused_at_once(name: str, light: Light) -> None:
    found, plan = light.on(name, "ready()\n", nodes=64)
    with pytest.raises(Refused) as refused:
        follow(found, plan)
    assert refused.value.problems[0].id == REFUSED[name]
    assert not light.attempt.root.exists()


@LONG
def test_the_death_of_the_flow(name: str, make: Maker, undisturbed: TrainReport) -> None:
    """A local run ends with its flow and is continued; a job goes on, and the next flow attaches to it."""
    run = make(name)
    launch = run.prepared()
    flow = subprocess.Popen([sys.executable, "-c", FLOW, str(run.paths.launch)])
    try:
        run.wait_for(1, "checkpoint", 3)
    finally:
        flow.send_signal(signal.SIGKILL)
        flow.wait()
    if name == "local":
        until(lambda: not marked(run.run_id), "an end of all ranks")
        assert [row.state for row in reconcile(run.paths, run.spec.recovery)] == ["lost"]
        report = run.attempt()
    else:
        before = a_flow_on(name).attach(run.paths)
        assert before is not None
        report = run.attempt(launch=launch)
        after = Handle.model_validate_json((run.paths.root / f"{name}.json").read_bytes())
        assert after == before
    assert (report.state, report.attempts) == ("completed", 2 if name == "local" else 1), report.cause
    assert losses(report) == losses(undisturbed)
    assert report.train[-1].step == STEPS


@LONG
def test_a_signal_to_the_waiting_flow_ends_the_run(name: str, light: Light) -> None:
    found, plan = light.on(name, "ready()\ntime.sleep(600)\n")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    threading.Timer(0.0, lambda: (light.ranks_ready(), os.kill(os.getpid(), signal.SIGINT))).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            follow(found, plan)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not marked(light.run_id)
