"""The benchmarks: the page is made from the kept results, the arithmetic is right, and one tiny run is counted."""

from __future__ import annotations

import argparse
import importlib
import json
import venv
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, harness, launch, peers, scale, throughput
from benchmarks.__main__ import main
from benchmarks.assets import make_assets
from benchmarks.harness import Result, exponent, keep, load
from benchmarks.page import PAGE, PARTS, page


def result_of(name: str, rows: list[dict[str, Any]]) -> Result:
    return Result(
        name=name, date="2026-01-01", commit="", machine={}, versions={}, commands=(), rows=tuple(rows)
    )


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m benchmarks page"


def test_every_part_has_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in PARTS:
        importlib.import_module(f"benchmarks.{name}")
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert "--add" in capsys.readouterr().out


def test_results_name_no_place_of_the_machine_they_are_from() -> None:
    for file in harness.RESULTS.glob("*.json"):
        assert load(file.stem) is not None
        text = file.read_text(encoding="utf-8")
        assert not [word for word in ("/tmp", "/home", "/root", "/work", "/usr") if word in text], file


def test_rows_are_added_to_those_of_the_same_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    keep("x", [{"a": 1}], add=True)
    assert keep("x", [{"a": 2}], add=True, more_versions={"peer: torch": "1"}).rows == ({"a": 1}, {"a": 2})
    assert len(keep("x", [{"a": 3}], add=False).rows) == 1
    keep("x", [{"a": 4}], add=True, more_versions={"peer: torch": "1"})
    with pytest.raises(ValueError, match="other versions of peer: torch"):
        keep("x", [], add=True, more_versions={"peer: torch": "2"})
    file = tmp_path / "x.json"
    file.write_text(file.read_text().replace('"cores": ', '"cores": 9'))
    with pytest.raises(ValueError, match="another machine"):
        keep("x", [], add=True)


def test_exponents() -> None:
    assert exponent([1, 10, 100], [3, 30, 300]) == pytest.approx(1.0)
    assert exponent([1, 10, 100], [5, 500, 50_000]) == pytest.approx(2.0)
    assert exponent([1, 4], [7, 7]) == pytest.approx(0.0)
    with pytest.raises(ValueError, match="two different"):
        exponent([3, 3], [1, 2])
    rows = [
        {"kind": "runs", "size": size, "begin_s": cost} for size, cost in ((1, 9.0), (1, 1.0), (10, 10.0))
    ]
    assert scale.summary(result_of("scale", rows)) == [
        {"kind": "runs", "figure": "begin_s", "by_size": {1: 1.0, 10: 10.0}, "exponent": 1.0}
    ]


def test_what_the_ranks_counted_becomes_figures() -> None:
    times = {
        "train_begin": 110.0,
        "train_end": 130.0,
        "first_step_end": 112.0,
        "cpu_begin": 4.0,
        "cpu_end": 14.0,
    }
    counts = {"steps": 3, "real": 600, "slots": 800, "trained": 90, "max_rss_mb": 100.0}
    rank: dict[str, Any] = times | counts | {"losses": [9.0, 8.0]}
    later = rank | {"train_begin": 111.0, "train_end": 131.0, "first_step_end": 113.0, "max_rss_mb": 120.4}
    found = peers.counted([rank, later], begun=100.0)
    assert (found["train_begin_s"], found["first_step_s"], found["train_s"]) == (10.0, 13.0, 21.0)
    assert (found["start_cpu_s"], found["train_cpu_s"], found["padding_share"]) == (8.0, 20.0, 0.25)
    assert (found["tokens_per_s"], found["tokens_per_cpu_s"]) == (round(1200 / 21, 1), 60.0)
    assert (found["max_rss_mb"], found["loss"], found["trained_tokens"]) == (120, 8.0, 180)


def test_ratios_are_of_rounds_that_have_both() -> None:
    def row(number: int, run: str, value: float) -> dict[str, Any]:
        return {"round": number, "run": run, "tokens_per_s": value}

    rows = [row(1, "ours", 300), row(1, "trl", 100), row(2, "ours", 500), row(2, "trl", 250), row(3, "ours", 9999),
            {"round": 3, "run": "trl", "why": "gone"}, row(4, "trl", 1)]  # fmt: skip
    assert throughput.ratios(result_of("throughput", rows), "tokens_per_s") == {"trl": 400 / 175}


def test_phases_take_what_lies_between_their_beginnings() -> None:
    phases = {"b": 12.0, "a": 10.0, "end": 15.5}
    assert launch.phase_seconds(phases) == {"a": 2.0, "b": 3.5}
    phases = {"command": 1.0, "detect hardware": 6.0, "first step is done": 9.0}
    assert launch.from_flow_start(phases) == 3.0
    assert launch.from_flow_start(phases | {"flow": 4.0}) == 5.0


def test_a_peer_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PINS, "soup", ("soup-cli", "0.0.0"))
    venv.create(tmp_path / "peers" / "soup", with_pip=False)  # so that pip is not there to install it
    row = peers.run_peer("soup", tmp_path, tmp_path / "peers")
    assert row["run"] == "soup"
    assert "soup-cli 0.0.0: " in row["why"]
    assert throughput.summary(result_of("throughput", [row]))[0]["why"] == row["why"]


def test_without_a_gpu_nothing_is_run_and_nothing_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.run(argparse.Namespace(budget=1.0, add=False)) is None
    assert "skipped" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_operations_of_a_token() -> None:
    shape = {"hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1}  # fmt: skip
    # q and o 4 x 4, k and v 4 x 2, three of the MLP 4 x 8: 144 a layer; the head 4 x 10
    forward, attention = 2 * (2 * 144 + 40), 2 * (4 * 6 / 2) * 4 / 2 * 2
    whole = gpu.flops_per_token(shape, full=True, length=6, vocabulary=10)
    assert whole == 3 * forward + 3 * attention
    assert whole - gpu.flops_per_token(shape, full=False, length=6, vocabulary=10) == forward


@pytest.mark.long
@pytest.mark.ranks
def test_a_tiny_run_is_counted(tmp_path: Path) -> None:
    stats = make_assets(tmp_path / "chat", 40)
    row = peers.run_peer("ours", tmp_path / "chat", tmp_path, out=tmp_path / "out")
    assert row["exit_code"] == 0, (tmp_path / "out" / "log").read_text()
    assert row["real_tokens"] == stats["tokens"]
    assert (row["steps"], row["padding_share"]) == (3, 0.0)
    names = list(launch.phase_seconds(row["phases"]))
    assert names[0] == "command"
    assert names[-1] == "first step"
    assert json.loads((tmp_path / "out" / "counts" / "rank1.json").read_text())["real"] > 0
