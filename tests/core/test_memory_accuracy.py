"""The predictor against published measurements, through the script that anybody can run."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "tests" / "data" / "memory_measured.csv"
SCRIPT = ROOT / "benchmarks" / "memory_accuracy.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def report() -> dict:
    done = run("--rows", ROWS, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_core_allocated(report: dict) -> None:
    found = report["groups"]["core_allocated"]
    assert found["n"] == 80
    assert found["within_10"] >= 92
    assert found["within_20"] >= 97
    assert abs(found["bias"]) <= 3
    assert found["under_10_not_low"] == 0


def test_requirements_cover_what_was_reserved(report: dict) -> None:
    assert report["groups"]["core_reserved"]["required_covers"] >= 95
    assert report["groups"]["offload"]["required_covers"] >= 95


def test_zero_within_20(report: dict) -> None:
    assert report["groups"]["zero"]["within_20"] == 100


def test_decisions(report: dict) -> None:
    found = report["groups"]["oom"]
    assert found["failed"] == 54
    assert found["accepted"] == 0
    assert found["refused_good"] <= 0.15 * found["good"]


def test_better_than_the_other_estimators_on_full_training(report: dict) -> None:
    found = report["groups"]["core_allocated_full"]
    assert found["baselines"]["accelerate"]["n"] == found["n"]
    assert found["mape"] < min(other["mape"] for other in found["baselines"].values()) / 5


def test_every_group_has_the_agreed_keys(report: dict) -> None:
    keys = {"n", "mape", "bias", "within_10", "within_20", "worst_under", "worst_over"}
    for name, group in report["groups"].items():
        assert keys <= set(group) or name == "oom"
    assert report["predicted"] + report["skipped"] == report["rows"] == 565


def test_unknown_values_are_skipped_and_counted(tmp_path: Path) -> None:
    with ROWS.open(newline="") as file:
        good = [row for row in csv.DictReader(file) if row["scope"] == "core"][:40]
    strange = ["", "?", "<=768", "-3", "0", "nan", "inf", "1e400", "tensor_parallel", "\u2603", "4 (default)"]
    bad = [dict(good[i % 40], **{key: value}) for i, key in enumerate(good[0]) for value in strange]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(good[0]))
        writer.writeheader()
        writer.writerows([*good, *bad])
    done = run("--rows", path, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rows"] == len(good) + len(bad)
    assert found["skipped"] > 100
    assert sum(found["skipped_why"].values()) == found["skipped"]
    assert run("--rows", path).returncode == 0


def test_few_or_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS.read_text().splitlines()[0] + "\n")
    found = json.loads(run("--rows", path, "--json").stdout)
    assert found["groups"]["core_allocated"] == {
        "n": 0,
        **dict.fromkeys(("mape", "bias", "within_10", "within_20", "worst_under", "worst_over")),
    }
    assert run("--rows", path).returncode == 0


@pytest.mark.parametrize(("text", "words"), [("a,b\n1,2\n", "lacks the columns"), (None, "No such file")])
def test_wrong_files(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text)
    done = run("--rows", path)
    assert done.returncode == 2
    assert words in done.stderr
