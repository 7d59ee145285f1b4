"""Drills about what happens in the ranks, with a real tiny run each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soup_flows.demo import build_demo_data, build_demo_model
from soup_flows.diagnose import diagnose
from soup_flows.drill import DrillResult, drill
from soup_flows.drill.cases import DRILLS
from soup_flows.report import TrainReport

pytestmark = [pytest.mark.ranks, pytest.mark.long]

NAMES = [n for n, c in DRILLS.items() if not c.quick and not c.server]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One output folder, so that the demo's model is built once."""
    folder = tmp_path_factory.mktemp("drills")
    train_path, _ = build_demo_data(folder / "demo")
    build_demo_model(folder / "demo" / "tiny-llama", train_path)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_drill_ends_with_the_right_class(name: str, folder: Path) -> None:
    result = drill(name, folder)
    assert result.found_class == result.expected_class, result
    assert result.survivors == 0
    assert result.passed, result
    check = globals().get(f"check_{name}")
    if check is not None:
        check(result)


def check_hang_collective(result: DrillResult) -> None:
    (cause, *_) = result.notes
    assert "rank 1 in recv" in cause


def check_nan_loss(result: DrillResult) -> None:
    found = diagnose(result.run_dir)
    assert found.advice.startswith("Lower training.learning_rate")
    assert result.steps_lost >= 4


def check_host_oom(result: DrillResult) -> None:
    assert "rank 1" in result.notes[0]


def check_bad_row(result: DrillResult) -> None:
    assert '"line": 8' in result.notes[-1]


def check_exit_abort(result: DrillResult) -> None:
    report = TrainReport.load(result.run_dir)
    (warning,) = [p for p in report.problems if p.id == "EXIT001"]
    assert "SIGABRT" in warning.message
    assert warning.severity == "warning"


def check_log_flood(result: DrillResult) -> None:
    """Every line of the flood is in the logs, however long they are."""
    from soup_flows.training.drills import FLOOD_LINES

    attempt = Path(result.run_dir) / "attempt-1"
    for rank in (0, 1):
        text = (attempt / "logs" / f"rank_{rank}.log").read_text()
        assert sum(line.startswith("flood ") for line in text.splitlines()) == FLOOD_LINES
    steps = [json.loads(line) for line in (attempt / "events.jsonl").read_text().splitlines()]
    ranks = {event["rank"] for event in steps if event["kind"] == "step" and event["host_bytes"] > 0}
    assert ranks == {0, 1}
