"""Preparing short rows: seconds, rows per second, memory of all processes together, and a second call.

Memory is the proportional set size of this process's children, sampled twice a second, so that shared pages count
once. The second call finds everything in the cache.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Result, Row, exponent, keep
from soup_flows.data.prepare import prepare_data
from soup_flows.demo import build_demo_data, build_demo_model
from soup_flows.spec import parse_spec

SIZES = (1_000, 10_000, 100_000, 1_000_000)
GOAL_MIB = 2048
"""Most memory for the largest size."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--rows", type=int, nargs="+", default=SIZES, help="sizes, default %(default)s")
    parser.add_argument("--workers", type=int, help="processes that tokenise; by default the package chooses")


def run(arguments: argparse.Namespace) -> Result:
    """Prepare data sets of each size."""
    return keep("prepare", _rows(arguments), add=arguments.add)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train, _ = build_demo_data(folder)
        model = build_demo_model(folder / "model", train)
        for size in arguments.rows:
            data = write_rows(folder / f"{size}.jsonl", train, size)
            yield prepared(model, data, folder / str(size), arguments.workers)
            data.unlink()


def write_rows(path: Path, source: Path, rows: int) -> Path:
    """Write chat rows of about 40 tokens with the words of the demo's answers."""
    lines = source.read_text(encoding="utf-8").splitlines()
    words = [word for line in lines for word in json.loads(line)["messages"][1]["content"].split()]
    draw = random.Random(7)
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            start = draw.randrange(len(words) - 30)
            question, answer = " ".join(words[start : start + 8]), " ".join(words[start + 8 : start + 28])
            turns = [
                {"role": "user", "content": f"{number} {question}"},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


class Peak(threading.Thread):
    """Samples the memory of the children until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.over = threading.Event()

    def run(self) -> None:
        """Sample twice a second."""
        while not self.over.wait(0.5):
            total = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.bytes = max(self.bytes, total)


def prepared(model: Path, data: Path, out: Path, workers: int | None) -> Row:
    """Prepare one data set twice."""
    values = {"model": str(model), "dataset": str(data), "output_dir": str(out), "device": "cpu"}
    spec = parse_spec(values | {"data": {"workers": workers}, "validation": {"deep": False}})
    peak = Peak()
    peak.start()
    begun = time.perf_counter()
    found = prepare_data(spec)
    seconds = time.perf_counter() - begun
    peak.over.set()
    begun = time.perf_counter()
    assert prepare_data(spec) == found
    again = time.perf_counter() - begun
    return {
        "rows": found.train_rows,
        "tokens": found.train.report.total_tokens,
        "data_mib": round(data.stat().st_size / 2**20, 1),
        "workers": workers or "chosen",
        "seconds": round(seconds, 2),
        "rows_per_s": round(found.train_rows / seconds),
        "peak_mib": round(peak.bytes / 2**20),
        "second_call_s": round(again, 3),
    }


def summary(result: Result) -> dict[str, Any]:
    """Return the exponents of time and memory over the rows."""
    sizes = [row["rows"] for row in result.rows]
    if len(set(sizes)) < 2:
        return {}
    return {
        figure: round(exponent(sizes, [row[figure] for row in result.rows]), 2)
        for figure in ("seconds", "peak_mib", "second_call_s")
        if min(row[figure] for row in result.rows) > 0
    }
