"""Presets side by side, from reports and run directories made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from soup_flows.compare import comparison_page, measured
from soup_flows.errors import Refused, refuse
from soup_flows.launch.rank import EventWriter
from soup_flows.ledger import Attempt
from soup_flows.paths import RunPaths
from soup_flows.presets import strategy_settings
from soup_flows.report import Point, RankMemory, TrainReport


def report(folder: Path, seconds: float) -> TrainReport:
    paths = RunPaths.of(folder, "run").create()
    for rank in (0, 1):
        writer = EventWriter(paths.attempt(1).events, rank)
        for step in (1, 2, 3):
            writer.write("step", step=step, tokens=100, seconds=60.0 if step == 1 else seconds / (1 + rank))
    return TrainReport(
        run_id="run",
        run_dir=str(paths.root),
        state="completed",
        attempts=1,
        ledger=(Attempt(number=1, started=0, state="completed", seconds=70, gpu_hours=0.04, cost=0.1),),
        train=(Point(step=3, loss=2.0),),
        evaluations=(Point(step=3, loss=2.5),),
        memory=(RankMemory(rank=0, host_peak_bytes=1 << 30), RankMemory(rank=1, host_peak_bytes=3 << 30)),
    )


def test_the_page_has_speed_memory_and_cost(tmp_path: Path) -> None:
    rows = [
        measured("zero2", report(tmp_path / "a", seconds=2.0)),
        measured("ddp", report(tmp_path / "b", seconds=1.0)),
        measured("zero3", refuse("PLAN020", "gpus", "does not fit")),
    ]
    assert rows[0].tokens_per_second == pytest.approx(100)  # 2 ranks x 100 tokens in the slower rank's 2 s
    assert rows[1].tokens_per_second == pytest.approx(200)
    assert rows[0].host_peak_bytes == 3 << 30
    page = comparison_page(rows)
    assert "Fastest: **ddp**, 200 tokens/s." in page
    assert "| zero2 | completed | 2 | 2.5 | 100 | – | 3.00 GiB | 70 s | 0.040 | 0.10 |" in page
    assert "does not fit" in page
    assert f"- ddp: `{tmp_path}/b/runs/run`" in page


def test_every_preset_is_one_setting() -> None:
    assert strategy_settings("zero++") == {"deepspeed": "zero++"}
    assert strategy_settings("shard_grad") == {"fsdp": "shard_grad"}
    assert strategy_settings("single") == {"strategy": "single"}
    with pytest.raises(Refused, match="did you mean 'zero3'"):
        strategy_settings("zero33")
