"""What an attempt's GPUs used: from replayed readings of the counters to the ledger's line and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soup_flows.attempts import record
from soup_flows.attempts_page import attempts_page
from soup_flows.hardware import NvidiaReading, RecordedProbe
from soup_flows.hardware.energy import metered, used_joules
from soup_flows.paths import RunPaths, write_atomic
from soup_flows.report import TrainReport
from tests.core.checkpoint_files import make_spec, plan_of

RECORDED = Path(__file__).parents[1] / "data/hardware/4xa100-sxm-nvlink.json"


def snapshot(file: Path, counters: list[int | None]) -> Path:
    """Write the recorded reading with these energy counters."""
    reading = NvidiaReading.model_validate_json(RECORDED.read_bytes())
    gpus = [gpu.model_copy(update={"energy_mj": mj}) for gpu, mj in zip(reading.gpus, counters, strict=True)]
    file.write_text(reading.model_copy(update={"gpus": tuple(gpus)}).model_dump_json())
    return file


def meter(tmp_path: Path, after: list[int | None], file: Path) -> None:
    """Measure GPUs 1 and 2 of four; they begin at 1000 and 2000 J."""
    probe = RecordedProbe(snapshot(tmp_path / "before.json", [0, 1_000_000, 2_000_000, None]))
    later = snapshot(tmp_path / "after.json", after)
    uuids = [str(gpu.uuid) for gpu in probe.read().gpus[1:3]]

    def cancelled() -> None:
        with metered(uuids, file, probe):
            probe.path = later
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cancelled()


@pytest.mark.parametrize(
    ("after", "joules"),
    [
        ([9, 8_200_000, 2_000_000, None], 7200.0),
        ([9, 8_200_000, None, None], None),  # a counter that no longer answers
        ([9, 8_200_000, 5, None], None),  # a driver that was loaded anew
    ],
)
def test_both_counters_of_the_run_count(
    tmp_path: Path, after: list[int | None], joules: float | None
) -> None:
    file = tmp_path / "attempt-1" / "energy.json"
    meter(tmp_path, after, file)
    assert used_joules(file) == joules


def test_without_a_reading_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "energy.json"
    with metered([], file):
        pass
    assert not file.exists()
    assert used_joules(file) is None
    for text in ("torn {", json.dumps({"uuids": [], "before_mj": {}, "after_mj": {}}), "[]"):
        file.write_text(text)
        assert used_joules(file) is None


def test_energy_and_money_are_in_the_ledger_and_on_its_page(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, strategy="ddp", recovery={"gpu_hour_price": 3.0})
    paths = RunPaths.of(tmp_path, "run").create()
    write_atomic(paths.spec, spec.model_dump_json())
    meter(tmp_path, [9, 8_200_000, 2_000_000, None], paths.attempt(1).energy)
    base = TrainReport(run_id="run", run_dir=str(paths.root), state="failed", failure_class="rank_killed",
                       plan=plan_of(spec), seconds=1800.0)  # fmt: skip
    record(paths, 1, base, 0.0)
    report = record(paths, 2, base, 0.0)
    first, second = report.ledger
    assert (first.energy_joules, first.cost) == (7200.0, 3.0)
    assert (second.energy_joules, second.cost) == (None, 3.0)
    page = attempts_page(report)
    assert "0.002 kWh" in page
    assert "All attempts: 2.000 GPU-hours (2.000 wasted), cost 6.00, 0.002 kWh in 1 of 2 attempts." in page
