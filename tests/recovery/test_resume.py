"""A run that is shot and resumed equals one that never was: losses and weights, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.recovery.conftest import (
    EVERY,
    STEPS,
    Case,
    Maker,
    assert_same_weights,
    kill_after,
    kill_in_save,
    losses,
)

pytestmark = [pytest.mark.ranks, pytest.mark.long]

LORA = {
    "training": {"method": "lora", "learning_rate": 1e-2},
    "lora": {"dropout": 0.2},
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("single", "ddp", "zero1", "zero2", "zero3", "full_shard", "shard_grad")},
    "ddp, lora with dropout": ("ddp", LORA),
    "zero3, lora with dropout": ("zero3", LORA),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_goes_on_bit_for_bit(name: str, case: Maker, undisturbed: Callable[..., Case]) -> None:
    preset, changes = RUNS[name]
    wanted = undisturbed(preset, **changes).reports[0]
    run = case(preset, **changes)
    in_save = random.random() < 0.5
    step = 4 if in_save else random.choice((4, 5))
    delay_s = random.uniform(0, 0.3)
    print(f"killed {'in the save of' if in_save else 'after'} step {step}, {delay_s:.3f} s later")
    killed = run.attempt(kill_in_save(step, delay_s) if in_save else kill_after(step, delay_s))
    assert (killed.state, killed.failure_class) == ("failed", "rank_killed")
    resumed = run.attempt()
    assert resumed.state == "completed"
    assert resumed.started_from >= EVERY
    assert 0 <= killed.ledger[-1].steps_lost <= EVERY
    assert losses(resumed) == losses(wanted)
    assert [step for step, _ in losses(resumed)] == list(range(1, STEPS + 1))
    assert_same_weights(resumed, wanted)
    proof = resumed.resumed
    assert proof is not None
    assert (proof.from_step, proof.step) == (resumed.started_from, resumed.started_from + 1)
    by_step = {point.step: point for point in wanted.train}
    assert proof.loss_before == by_step[proof.from_step].loss
    assert proof.learning_rate == by_step[proof.step].learning_rate
    assert not list(run.paths.checkpoints.glob("broken/*"))


@pytest.mark.parametrize(
    "preset", ["zero2_offload", "zero3_offload", "zero++", "full_offload", "hybrid_shard"]
)
def test_the_other_presets_repeat_the_lost_steps(preset: str, case: Maker) -> None:
    """Two attempts each: the steps that both made have the same losses."""
    run = case(preset)
    killed = run.attempt(kill_after(5))
    assert killed.failure_class == "rank_killed"
    resumed = run.attempt()
    assert (resumed.state, resumed.started_from) == ("completed", 4)
    assert losses(resumed)[:5] == losses(killed)[:5]
    assert [step for step, _ in losses(resumed)] == list(range(1, STEPS + 1))
