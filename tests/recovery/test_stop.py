"""Runs that are asked to stop save first, go on later with another plan, and saves that fail are survived."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from soup_flows.checkpoints import verify
from soup_flows.launch import proc
from soup_flows.launch.plan import LaunchPlan
from soup_flows.ledger import Change
from soup_flows.recovery import Decision, move_weights
from soup_flows.resume import Orders
from soup_flows.stop import stop
from tests.recovery.conftest import (
    STEPS,
    Case,
    Maker,
    assert_same_weights,
    kill_after,
    losses,
    read,
    wait_for,
)

pytestmark = pytest.mark.ranks
LONG = pytest.mark.long
NO_SAVES = {"recovery": {"save_steps": 100}}


def copy_of(case: Case, name: str) -> Case:
    """The same run in another output folder, as it stands now."""
    target = Path(case.spec.output_dir).with_name(name)
    shutil.copytree(case.spec.output_dir, target)
    spec = case.spec.model_copy(update={"output_dir": str(target)})
    return Case(spec, case.zygote, case.run_id)


@pytest.fixture(scope="module")
def stopped(case: Maker) -> Case:
    """A run that was asked to save and stop."""

    def ask(run: Case, launch: LaunchPlan) -> None:
        wait_for(launch, "metrics", 3)
        stop(run.paths.root, save=True)

    run = case("ddp", **NO_SAVES)
    run.attempt(ask)
    run.paths.stop_request.unlink()
    return run


@LONG
def test_stop_and_save(stopped: Case, undisturbed: Callable[..., Case]) -> None:
    report = stopped.reports[0]
    assert (report.state, report.failure_class) == ("cancelled", "cancelled")
    assert report.stopped_at is not None
    step = report.stopped_at.step
    assert 3 <= step < STEPS
    assert f"saved at step {step}" in report.cause
    assert stopped.checkpoints() == [f"checkpoint-{step}"]
    run = copy_of(stopped, "goes-on")
    resumed = run.attempt()
    assert resumed.started_from == step
    wanted = undisturbed("ddp").reports[0]
    assert losses(resumed) == losses(wanted)
    assert_same_weights(resumed, wanted)


@LONG
def test_a_stopped_run_goes_on_with_half_the_rate_and_without_a_batch(
    stopped: Case, undisturbed: Callable[..., Case]
) -> None:
    run = copy_of(stopped, "changed")
    report = run.attempt(change=Change(learning_rate_scale=0.5, skip_steps=(STEPS,)))
    assert report.state == "completed"
    wanted = {p.step: p for p in undisturbed("ddp").reports[0].train}
    for point in report.train:
        factor = 1.0 if point.step <= report.started_from else 0.5
        assert point.learning_rate == pytest.approx((wanted[point.step].learning_rate or 0) * factor)
    assert report.train[-1].loss == 0.0
    assert report.ledger[-1].change.learning_rate_scale == 0.5


@LONG
def test_a_smaller_micro_batch_goes_on_with_the_same_result(
    stopped: Case, undisturbed: Callable[..., Case]
) -> None:
    run = copy_of(stopped, "smaller")
    change = Change(per_device_train_batch_size=2, gradient_checkpointing=True)
    report = run.attempt(change=change)
    assert report.plan is not None
    assert report.plan.batch.per_device_train_batch_size == 2
    assert report.plan.batch.global_batch_size == 16
    wanted = losses(undisturbed("ddp").reports[0])
    assert [step for step, _ in losses(report)] == [step for step, _ in wanted]
    assert [loss for _, loss in losses(report)] == pytest.approx([loss for _, loss in wanted], rel=1e-5)


@LONG
def test_another_strategy_goes_on_from_the_weights(stopped: Case) -> None:
    run = copy_of(stopped, "weights")
    decision = Decision(retry=True, reason="", change=Change(strategy="zero2"))
    change = move_weights(run.paths, decision, STEPS).change
    report = run.attempt(change=change)
    assert report.state == "completed"
    assert report.proof is not None
    assert {row.zero_stage for row in report.proof.ranks} == {2}
    assert report.resumed is not None
    assert report.resumed.weights_only
    assert report.resumed.loss == pytest.approx(report.resumed.loss_before, rel=0.1)
    assert report.steps == STEPS - report.resumed.from_step


@LONG
def test_one_rank_goes_on_where_two_stopped(stopped: Case, undisturbed: Callable[..., Case]) -> None:
    run = copy_of(stopped, "one-rank")
    run.spec = run.spec.model_copy(update={"strategy": "single", "gpus": 1})
    report = run.attempt()
    assert (report.state, report.started_from > 0) == ("completed", True)
    wanted = losses(undisturbed("ddp").reports[0])
    assert [loss for _, loss in losses(report)] == pytest.approx([loss for _, loss in wanted], rel=1e-5)


@LONG
def test_a_stop_signal_saves_within_the_budget(case: Maker) -> None:
    def end(run: Case, launch: LaunchPlan) -> None:
        wait_for(launch, "metrics", 3)
        for pid in proc.marked(run.run_id, proc.SUPERVISOR_MARKER):
            os.kill(pid, signal.SIGTERM)

    run = case("zero2", **NO_SAVES)
    report = run.attempt(end)
    assert report.state == "cancelled"
    assert report.failure_class in ("cancelled", "preempted")
    assert report.stopped_at is not None
    assert f"saved at step {report.stopped_at.step}" in report.cause
    (name,) = run.checkpoints()
    assert verify(run.paths.checkpoints / name, run.run_id) == []


@LONG
def test_a_stop_without_save_leaves_none(case: Maker) -> None:
    def ask(run: Case, launch: LaunchPlan) -> None:
        wait_for(launch, "metrics", 1)
        stop(run.paths.root)

    run = case("ddp", recovery={"save_steps": 0})
    report = run.attempt(ask)
    assert report.state == "cancelled"
    assert "not saved" in report.cause
    assert run.checkpoints() == []


@LONG
def test_saves_that_fail_leave_the_run_training(case: Maker) -> None:
    """In the first one rank 1 cannot write its file, while rank 0 waits for it; then there is no folder at all."""

    def spoil(run: Case, launch: LaunchPlan) -> None:
        staging = run.paths.checkpoints / ".saving"
        while not staging.exists():
            time.sleep(0.001)
        name = "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt"
        (staging / "checkpoint-2" / name).mkdir(parents=True)
        wait_for(launch, "checkpoint", 4)
        staging.rmdir()
        staging.write_text("a file is where the folder should be")

    run = case("zero2")
    report = run.attempt(spoil)
    assert report.state == "completed"
    assert [line.split(":")[0] for line in report.save_failures] == ["step 2", "step 6"]
    assert [checkpoint.step for checkpoint in report.checkpoints] == [4]
    assert run.checkpoints() == ["checkpoint-4"]


@pytest.mark.parametrize("preset", ["ddp", pytest.param("zero2", marks=LONG), pytest.param("zero3", marks=LONG),
                                    pytest.param("full_shard", marks=LONG)])  # fmt: skip
def test_a_full_disk_at_a_save_leaves_the_run_training(preset: str, case: Maker) -> None:
    """The kernel refuses the writes of the second save half-way, on every rank; see `hooks/full_disk.py`."""
    run = case(preset)
    report = run.attempt(hook="full_disk")
    assert report.state == "completed"
    assert [line.split(":")[0] for line in report.save_failures] == ["step 4"] * len(report.save_failures)
    assert report.save_failures
    assert [checkpoint.step for checkpoint in report.checkpoints] == [2, 6]
    assert run.checkpoints() == ["checkpoint-2", "checkpoint-6"]
    assert not list(run.paths.checkpoints.glob(".saving/*"))


@LONG
def test_a_broken_checkpoint_is_not_loaded(case: Maker, undisturbed: Callable[..., Case]) -> None:
    run = case("ddp", recovery={"save_total_limit": 3})
    run.attempt(kill_after(7))
    assert run.checkpoints()[-1] == "checkpoint-6"
    file = run.paths.checkpoints / "checkpoint-6" / "optimizer.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    report = run.attempt()
    assert report.started_from == 4
    assert report.set_aside == (
        f"{run.paths.checkpoints}/broken/checkpoint-6: optimizer.pt has changed since it was saved",
    )
    assert (run.paths.checkpoints / "broken" / "checkpoint-6" / "optimizer.pt").exists()
    assert_same_weights(report, undisturbed("ddp").reports[0])
    orders = Orders.model_validate(read(run.paths.orders))
    assert orders.step == 4
    assert run.checkpoints() == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
