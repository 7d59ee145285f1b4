"""A run that is shot and resumed equals one that never was: losses and weights, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models import changed_model
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
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "full_shard", "shard_grad")
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in STRATEGIES},
    **{f"{name}, lora with dropout": (name, LORA) for name in STRATEGIES},
    "zero2, padded rows": ("zero2", {"data": {"packing": False}}),
    "ddp, attention dropout": ("ddp", {"model": "attention_dropout"}),
    "zero3, attention dropout": ("zero3", {"model": "attention_dropout"}),
}


def with_dropout(model: Path, folder: Path) -> Path:
    """Return a copy of the model whose attention drops weights while it trains; made once a session."""
    copy = folder / "model-with-dropout"
    return copy if copy.exists() else changed_model(model, copy, attention_dropout=0.2)


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_goes_on_bit_for_bit(
    name: str,
    case: Maker,
    undisturbed: Callable[..., Case],
    assets: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    preset, changes = RUNS[name]
    if "model" in changes:
        changes = {"model": str(with_dropout(Path(assets["model"]), tmp_path_factory.getbasetemp()))}
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
