"""Early stopping and the best checkpoint: what is decided, and that it works on sharded models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soup_flows.checkpoints import rotate
from soup_flows.training.best import Verdict, judge
from tests.conftest import Runner
from tests.training.test_methods import events

BEST = {"eval_steps": 2, "early_stopping_patience": 2, "load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("found", "threshold", "wanted"),
    [
        ([], 0.0, Verdict(None, float("inf"), 0)),
        ([(2, 1.0), (4, 0.9), (6, 0.95), (8, 0.9)], 0.0, Verdict(4, 0.9, 2)),
        ([(2, 1.0), (4, 0.95), (6, 0.93)], 0.1, Verdict(6, 0.93, 2)),
        ([(2, 1.0), (4, 1.1), (6, 0.5)], 0.1, Verdict(6, 0.5, 0)),
    ],
)
def test_verdict(found: list[tuple[int, float]], threshold: float, wanted: Verdict) -> None:
    assert judge(found, threshold) == wanted


def test_the_best_checkpoint_is_not_rotated_away(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
    removed = rotate(tmp_path, 1, known_good=("checkpoint-8",), spared={"checkpoint-4"})
    assert removed == ["checkpoint-6", "checkpoint-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-8"]


@pytest.fixture(scope="session")
def narrow(assets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Rows that help held-out rows for two steps at most: few of them for all weights, odd ones for adapters."""
    few = [json.loads(line) for line in Path(assets["dataset"]).read_text().splitlines()[:16]]
    odd = [
        {"messages": [row["messages"][0], {"role": "assistant", "content": "zq" * (10 + number)}]}
        for number, row in enumerate(few)
    ]
    files = {}
    for method, rows in (("full", few), ("lora", odd)):
        path = tmp_path_factory.mktemp("narrow") / f"{method}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[method] = str(path)
    return files


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "method"),
    [("zero2", "lora"), ("full_shard", "lora"), ("zero3", "full"), ("full_shard", "full"), ("ddp", "lora")],
)
def test_a_run_that_gets_worse_ends_with_its_best_model(
    finished: Runner, narrow: dict[str, str], preset: str, method: str
) -> None:
    report = finished(
        preset,
        dataset=narrow[method],
        method=method,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_steps=40,
        recovery={"save_total_limit": 1},
        **BEST,
    )
    assert report.early_stop is not None
    assert report.early_stop.waited == 2
    assert report.steps == report.early_stop.step < report.total_steps
    best = report.best
    assert best is not None
    assert best.step == report.early_stop.best_step == report.steps - 4
    measured = {point.step: point.loss for point in report.evaluations[:-1]}
    assert best.eval_loss == pytest.approx(measured[best.step], rel=1e-3)
    assert best.eval_loss == min(loss for step, loss in measured.items() if step)
    assert best.last_eval_loss > best.eval_loss
    assert report.eval_loss == best.eval_loss
    assert best.checkpoint is not None
    assert Path(best.checkpoint).is_dir()
    (verified,) = events(report, "verified")  # the saved model has the logits of the loaded one
    assert verified["difference"] < 1e-3
