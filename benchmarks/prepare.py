"""Prepare a million short rows and say what it took: `python benchmarks/prepare.py [ROWS] [WORKERS]`.

Prints one JSON object: seconds, rows per second, peak memory of all processes together (PSS, so that shared pages
count once), and the seconds of a second call, which finds everything in the cache.
"""

import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from soup_flows.data.prepare import prepare_data
from soup_flows.demo import build_demo_data, build_demo_model
from soup_flows.spec import parse_spec

rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
workers = int(sys.argv[2]) if len(sys.argv) > 2 else None


class Peak(threading.Thread):
    """Samples the memory of the children every half second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0

    def run(self) -> None:
        """Sample until the program ends."""
        while True:
            total = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.bytes = max(self.bytes, total)
            time.sleep(0.5)


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    train, _ = build_demo_data(folder)
    model = build_demo_model(folder / "model", train)
    words = [
        word
        for line in train.read_text().splitlines()
        for word in json.loads(line)["messages"][1]["content"].split()
    ]
    draw = random.Random(7)
    data = folder / "rows.jsonl"
    with data.open("w") as file:
        for number in range(rows):
            start = draw.randrange(len(words) - 30)
            question, answer = " ".join(words[start : start + 8]), " ".join(words[start + 8 : start + 28])
            turns = [
                {"role": "user", "content": f"{number} {question}"},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    values = {"model": str(model), "dataset": str(data), "output_dir": str(folder), "device": "cpu"}
    spec = parse_spec(values | {"data": {"workers": workers}})
    peak = Peak()
    peak.start()
    started = time.perf_counter()
    prepared = prepare_data(spec)
    seconds = time.perf_counter() - started
    again = time.perf_counter()
    assert prepare_data(spec) == prepared
    print(
        json.dumps(
            {
                "rows": prepared.train_rows,
                "tokens": prepared.train.report.total_tokens,
                "data_mib": round(data.stat().st_size / 2**20),
                "workers": workers or "cores",
                "seconds": round(seconds, 1),
                "rows_per_second": round(prepared.train_rows / seconds),
                "peak_mib_all_processes": round(peak.bytes / 2**20),
                "second_call_seconds": round(time.perf_counter() - again, 2),
            }
        )
    )
