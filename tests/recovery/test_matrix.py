"""Every preset with every weight and with adapters: trains, evaluates, saves, resumes, exports, opens again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soup_flows.deepspeed import DEEPSPEED_PRESETS
from soup_flows.fsdp import FSDP_PRESETS
from tests.recovery.conftest import STEPS, Maker, kill_after, losses

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(600)]

PRESETS = ["single", "ddp", *(p for p in DEEPSPEED_PRESETS if p != "zero3_nvme"), *FSDP_PRESETS]
EVALUATE = Path(__file__).parents[1] / "training" / "evaluate_model.py"
METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"method": "lora", "learning_rate": 1e-2}}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", PRESETS)
def test_preset(preset: str, method: str, case: Maker, assets: dict[str, str]) -> None:
    data = {"eval_dataset": assets["eval_dataset"], "max_length": 256}
    run = case(preset, training={**METHODS[method], "eval_steps": 3}, data=data)
    killed = run.attempt(kill_after(5))
    assert (killed.state, killed.failure_class) == ("failed", "rank_killed")
    report = run.attempt()
    assert (report.state, report.started_from) == ("completed", 4)
    assert report.proof is not None
    assert not report.proof.failures
    assert [step for step, _ in losses(report)] == list(range(1, STEPS + 1))
    assert losses(report)[:5] == losses(killed)[:5]
    assert [point.step for point in report.evaluations] == [0, 3, 6, STEPS]
    assert report.eval_loss < report.first_eval_loss
    assert run.checkpoints() == ["checkpoint-4", "checkpoint-6"]
    assert report.model is not None
    argv = [sys.executable, str(EVALUATE), report.model, assets["eval_dataset"]]
    opened = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert opened.returncode == 0, opened.stderr
    assert float(opened.stdout) == pytest.approx(report.eval_loss, rel=1e-4)
