"""Runs that go on with another number of ranks: the losses of a run that was never interrupted, to rounding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from soup_flows.errors import Refused
from soup_flows.report import TrainReport
from tests.recovery.conftest import STEPS, Maker, kill_after, losses

pytestmark = pytest.mark.ranks
LORA = {"training": {"method": "lora", "learning_rate": 1e-2}}
BF16 = {"training": {"dtype": "bf16"}}
TWELVE = {"training": {"global_batch_size": 12, "per_device_train_batch_size": 4}}
LONG = pytest.mark.long


def assert_close_weights(one: TrainReport, other: TrainReport, most: float) -> None:
    """The final weights agree to rounding; those of a wrong resume differ by the learning rate, 1e-3."""
    (file,) = Path(str(one.model)).glob("*model.safetensors")
    mine, theirs = load_file(file), load_file(Path(str(other.model)) / file.name)
    assert mine.keys() == theirs.keys()
    worst = max(float((mine[name].float() - theirs[name].float()).abs().max()) for name in mine)
    print(f"largest difference of a weight: {worst:.2g}")
    assert worst < most


def test_the_lost_steps_are_repeated_by_another_number_of_ranks(case: Maker) -> None:
    """Three of them: the first proves the weights, the second and third the optimizer's state."""
    run = case("zero2", recovery={"save_steps": 4})
    killed = run.attempt(kill_after(7))
    assert (killed.failure_class, killed.ledger[-1].good_step) == ("rank_killed", 4)
    run.spec = run.spec.model_copy(update={"gpus": 1})
    resumed = run.attempt()
    assert (resumed.state, resumed.started_from) == ("completed", 4)
    lost = [loss for step, loss in losses(killed) if step > 4]
    assert len(lost) >= 3
    again = [loss for step, loss in losses(resumed) if step > 4]
    assert again[: len(lost)] == pytest.approx(lost, rel=1e-4)


@pytest.mark.parametrize(
    ("preset", "ranks", "then", "changes"),
    [
        pytest.param("zero2", 2, 1, {}, marks=LONG),
        pytest.param("full_shard", 2, 1, {}, marks=LONG),
        pytest.param("zero3", 2, 1, LORA, marks=LONG),
        pytest.param("zero1", 2, 1, {}, marks=LONG),
        pytest.param("full_shard", 1, 2, {}, marks=LONG),
        pytest.param("zero2", 1, 2, {}, marks=LONG),
        pytest.param("shard_grad", 2, 1, {}, marks=LONG),
        pytest.param("zero2", 2, 1, BF16, marks=LONG),
        pytest.param("zero1", 1, 2, BF16, marks=LONG),
        pytest.param("zero3", 2, 1, {"training": LORA["training"] | BF16["training"]}, marks=LONG),
        pytest.param("zero2", 2, 1, LORA, marks=LONG),
        pytest.param("full_shard", 2, 1, LORA, marks=LONG),
        pytest.param("zero1", 1, 2, {}, marks=LONG),
        pytest.param("zero3", 1, 2, LORA, marks=LONG),
        pytest.param("zero2", 2, 3, TWELVE, marks=LONG),
        pytest.param("full_shard", 2, 3, TWELVE, marks=LONG),
    ],
)
def test_another_number_of_ranks_goes_on(
    preset: str,
    ranks: int,
    then: int,
    changes: dict[str, Any],
    case: Maker,
    undisturbed: Callable[..., Any],
) -> None:
    wanted = undisturbed(preset, **changes).reports[0]
    run = case(preset, **changes, gpus=ranks)
    assert run.attempt(kill_after(5)).failure_class == "rank_killed"
    run.spec = run.spec.model_copy(update={"gpus": then})
    resumed = run.attempt()
    assert (resumed.state, resumed.started_from) == ("completed", 4)
    assert resumed.plan is not None
    assert resumed.plan.world_size == then
    assert [step for step, _ in losses(resumed)] == list(range(1, STEPS + 1))
    assert [loss for _, loss in losses(resumed)] == pytest.approx(
        [x for _, x in losses(wanted)], rel=5e-3 if resumed.plan.dtype == "bf16" else 1e-4
    )
    assert_close_weights(resumed, wanted, 1e-2 if resumed.plan.dtype == "bf16" else 1e-4)
    assert not (run.paths.checkpoints / ".universal").exists()
    if preset.startswith("zero"):
        config = json.loads(run.paths.config("deepspeed").read_text())
        assert config["checkpoint"] == {"load_universal": True}
    again = run.paths.checkpoints / "checkpoint-6"
    assert json.loads((again / "manifest.json").read_text())["world_size"] == then


@pytest.mark.long
def test_a_zero3_full_fine_tune_is_refused_and_goes_on_from_its_weights(case: Maker) -> None:
    run = case("zero3")
    run.attempt(kill_after(5))
    run.spec = run.spec.model_copy(update={"gpus": 1})
    with pytest.raises(Refused, match="counts Adam's steps twice") as refused:
        run.attempt()
    (problem,) = refused.value.problems
    assert (problem.id, problem.field) == ("RES001", "gpus")
    assert "model=<the checkpoint's folder>, recovery.resume=never" in problem.fix
    folder = run.paths.checkpoints / "checkpoint-4"
    fresh = case("zero3", gpus=1, model=str(folder))
    assert fresh.attempt().state == "completed"
    assert fresh.reports[0].first_loss == pytest.approx(run.reports[0].train[4].loss, rel=0.2)
