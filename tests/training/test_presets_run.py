"""Every preset really trains on two CPU ranks: equal losses, real sharding, a model that opens."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from soup_flows.report import TrainReport
from tests.conftest import STEPS, Runner

pytestmark = pytest.mark.ranks

SAME_LOSSES = ("single", "ddp", "zero1", "zero2", "zero3", "full_shard", "shard_grad")
OTHERS = ("zero2_offload", "zero3_offload", "zero++", "full_offload", "hybrid_shard")
EVERY = [*SAME_LOSSES, *(pytest.param(preset, marks=pytest.mark.long) for preset in OTHERS)]
SHARDS_PARAMETERS = {
    "zero3",
    "zero3_offload",
    "zero++",
    "full_shard",
    "shard_grad",
    "full_offload",
    "hybrid_shard",
}
SHARDS_OPTIMIZER = SHARDS_PARAMETERS | {"zero1", "zero2", "zero2_offload"}


def losses(report: TrainReport) -> list[float]:
    return [point.loss for point in report.train if point.loss is not None]


@pytest.mark.parametrize("preset", SAME_LOSSES)
def test_losses_do_not_depend_on_the_strategy(finished: Runner, preset: str) -> None:
    found, wanted = losses(finished(preset)), losses(finished("ddp"))
    assert len(found) == STEPS
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("preset", EVERY)
def test_proof_holds_what_the_preset_promises(finished: Runner, preset: str) -> None:
    report = finished(preset)
    assert report.state == "completed"
    assert report.proof is not None
    assert not report.proof.failures
    ranks = 1 if preset == "single" else 2
    assert report.proof.world_size == ranks == len({row.pid for row in report.proof.ranks})
    for row in report.proof.ranks:
        assert row.parameters_held == row.parameters_total // (2 if preset in SHARDS_PARAMETERS else 1)
        assert row.optimizer_held == pytest.approx(
            row.trainable_total / (2 if preset in SHARDS_OPTIMIZER else 1), rel=0.01
        )
        assert set(row.dtypes) == {"float32"}


@pytest.mark.parametrize("preset", EVERY)
def test_model_opens_and_has_the_reported_loss(finished: Runner, assets: dict[str, str], preset: str) -> None:
    report = finished(preset)
    assert report.model is not None
    reopened = evaluate_in_a_process(report.model, assets["eval_dataset"])
    assert reopened == pytest.approx(report.eval_loss, rel=1e-4)
    assert report.eval_loss < report.first_eval_loss - 0.5
    assert not list(Path(report.model).glob("*.bin"))


def evaluate_in_a_process(model: str, dataset: str) -> float:
    """Compute the held-out loss with nothing but Transformers and the rows."""
    program = Path(__file__).with_name("evaluate_model.py")
    done = subprocess.run(
        [sys.executable, str(program), model, dataset], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_lora_trains_adapters_only(finished: Runner) -> None:
    report = finished("zero3", method="lora", learning_rate=1e-2)
    assert report.proof is not None
    row = report.proof.ranks[0]
    assert 0 < row.trainable_total < row.parameters_total / 2
    assert report.model is not None
    assert (Path(report.model) / "adapter_model.safetensors").stat().st_size > 10_000
    assert report.final_loss < report.first_loss - 0.1


def test_the_run_directory_tells_the_whole_run(finished: Runner) -> None:
    report = finished("zero2")
    run = Path(report.run_dir)
    assert TrainReport.load(run) == report
    assert json.loads((run / "ds_config.json").read_text())["zero_optimization"]["stage"] == 2
    assert json.loads((run / "spec.json").read_text())["deepspeed"] == "zero2"
    assert sorted(file.name for file in (run / "attempt-1" / "logs").iterdir()) == [
        "launcher.log",
        "rank_0.log",
        "rank_1.log",
        "supervisor.log",
    ]
    assert "step 1/20" in (run / "attempt-1" / "logs" / "rank_0.log").read_text()
    assert not list((run / "tmp").iterdir()) if (run / "tmp").exists() else True
    assert run.stat().st_mode & 0o077 == 0
    assert all(math.isfinite(memory.host_peak_bytes) for memory in report.memory)
    assert [memory.rank for memory in report.memory] == [0, 1]
