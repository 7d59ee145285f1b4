"""Trainer's trackers report from rank 0 alone, TensorBoard into the run directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from soup_flows.paths import RunPaths
from tests.conftest import STEPS, Runner

pytestmark = [pytest.mark.ranks, pytest.mark.long]


def test_tensorboard_gets_the_metrics_of_rank_0(finished: Runner) -> None:
    report = finished("ddp", report_to=["tensorboard"])
    folder = RunPaths(Path(report.run_dir)).tensorboard
    writers = {
        file.name.split(".")[-2] for file in folder.iterdir()
    }  # events.out.tfevents.TIME.HOST.PID.NUMBER
    assert len(writers) == 1, "one process; Trainer opens a second file for an evaluation after its end"
    seen = EventAccumulator(str(folder)).Reload()
    losses = {event.step: event.value for event in seen.Scalars("train/loss")}
    assert list(losses) == list(range(1, STEPS + 1))
    assert [losses[p.step] for p in report.train] == pytest.approx([p.loss for p in report.train])
    assert seen.Scalars("train/learning_rate")
