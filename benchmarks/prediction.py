"""Predicted against published memory, by group of measured runs; see `memory_accuracy.py` for the figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import ROOT, Result, Row, keep
from benchmarks.memory_accuracy import report

FILE = ROOT / "tests" / "data" / "memory_measured.csv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--file", type=Path, default=FILE, help="CSV with the columns of memory_measured.csv")


def run(arguments: argparse.Namespace) -> Result:
    """Predict every row of the file."""
    return keep("prediction", _rows(arguments), add=arguments.add)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    found = report(arguments.file)
    counts = {key: found[key] for key in ("rows", "predicted", "skipped")}
    yield {"group": "all rows"} | counts | {"skipped_why": found["skipped_why"]}
    for name, group in found["groups"].items():
        yield {"group": name} | group
