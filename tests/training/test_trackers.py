"""Trainer's trackers report from rank 0 alone, TensorBoard into the run directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from soup_flows.paths import RunPaths
from tests.conftest import STEPS, Runner

pytestmark = [pytest.mark.ranks, pytest.mark.long]

# The least of the package that Trainer asks for; it writes what it was told, by whom, and where to.
TENSORBOARD = """
import json, os
class SummaryWriter:
    def __init__(self, log_dir):
        os.makedirs(log_dir, exist_ok=True)
        self.file = open(os.path.join(log_dir, f"events.{os.environ['RANK']}"), "a")
    def add_scalar(self, name, value, step):
        print(json.dumps([name, value, step]), file=self.file, flush=True)
    def add_text(self, *_): pass
    def flush(self): pass
    def close(self): self.file.close()
"""


def test_tensorboard_gets_the_metrics_of_rank_0(
    finished: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorboardX.py").write_text(TENSORBOARD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    report = finished("ddp", report_to=["tensorboard"])
    files = list(RunPaths(Path(report.run_dir)).tensorboard.iterdir())
    assert [file.name for file in files] == ["events.0"]
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    losses = {step: value for name, value, step in rows if name == "train/loss"}
    assert list(losses) == list(range(1, STEPS + 1))
    assert [losses[p.step] for p in report.train] == [p.loss for p in report.train]
    assert any(name == "train/learning_rate" for name, _, _ in rows)
