"""Drills about processes, with ranks that only pretend to train."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from soup_flows.cli import main
from soup_flows.drill.cases import DRILLS
from soup_flows.errors import Refused
from soup_flows.spec import parse_spec

KEYS = ("expected_class", "found_class", "survivors", "seconds_to_clean", "steps_lost")


QUICK = [name for name, case in DRILLS.items() if case.quick]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All drills about processes, as the command runs and prints them."""
    folder = tmp_path_factory.mktemp("drills")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["drill", "all", "--quick", "--json", "--output-dir", str(folder)])
    return {result["drill"]: result for result in json.loads(printed.getvalue())["results"]}


@pytest.mark.ranks
@pytest.mark.parametrize("name", QUICK)
def test_a_drill_ends_clean(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert result["found_class"] == result["expected_class"], result
    assert (result["survivors"], result["leftovers"]) == (0, [])
    assert result["passed"], result


@pytest.mark.ranks
def test_the_command_prints_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "kill_rank", "--quick", "--json", "--output-dir", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(KEYS) <= set(result)
    assert (result["found_class"], result["survivors"]) == ("rank_killed", 0)
    assert result["steps_lost"] >= 4

    assert main(["diagnose", result["run_dir"], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failure_class"] == "rank_killed"
    assert found["living"] == []
    (attempt,) = found["attempts"]
    assert max(rank["step"] for rank in attempt["ranks"]) >= 4
    assert main(["diagnose", result["run_dir"]]) == 0
    text = capsys.readouterr().out
    assert text.index("What to do") < text.index("Cause")


def test_nothing_to_diagnose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(tmp_path)]) == 4
    assert main(["diagnose", str(tmp_path / "missing"), "--json"]) == 4
    assert "holds no run" in json.loads(capsys.readouterr().out)["error"]


def test_an_unknown_drill_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "kill_rnak", "--output-dir", str(tmp_path)]) == 2
    assert "did you mean 'kill_rank'?" in capsys.readouterr().err
    assert main(["drill", "nan_loss", "--quick", "--output-dir", str(tmp_path)]) == 2


def test_a_drill_in_the_spec_has_to_be_meant() -> None:
    values = {"model": "m", "dataset": "d", "launcher": {"drill": "kill_rank"}}
    with pytest.raises(Refused, match="allow_drill"):
        parse_spec(values)
    values["launcher"] |= {"allow_drill": True}
    assert parse_spec(values).launcher.drill == "kill_rank"
