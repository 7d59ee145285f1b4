"""What deciding costs: imports, plan and validation; the memory of the flow process and of the supervisor.

Processes are fresh ones; their processor time and peak memory are the kernel's account of them. Calls are made again
and again in one process, after a first call that is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, Row, keep
from benchmarks.light import light_plan
from soup_flows.data.prepare import prepare_data
from soup_flows.demo import build_demo_data, build_demo_model, demo_parameters
from soup_flows.hardware import detect
from soup_flows.launch.run import run as launch
from soup_flows.sharding import make_plan
from soup_flows.spec import parse_spec
from soup_flows.validation import validate

PLAN = ("plan", "--json", "--gpu", "h100-80gb", "--gpus", "8")
PROCESSES = {
    "nothing": "pass",
    "import soup_flows": "import soup_flows",
    "import soup_flows.spec": "import soup_flows.spec",
    "import prefect": "import prefect",
    "import soup_flows.flows": "import soup_flows.flows",
    "soup-flows plan": "import runpy; runpy.run_module('soup_flows.cli', run_name='__main__')",
}
PEAK = """
import atexit, pathlib, sys
atexit.register(lambda: sys.stderr.write(pathlib.Path("/proc/self/status").read_text()))
"""
"""Lets a process say its peak: the kernel's account of a child begins with its parent's."""
REPEATS = 20
"""Calls in one process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--rounds", type=int, default=3, help="of every process")


def run(arguments: argparse.Namespace) -> Result:
    """Run every process once a round, one after the other, then the calls and a launch of light ranks."""
    return keep("decisions", _rows(arguments), add=arguments.add)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train, _ = build_demo_data(folder / "demo")
        model = build_demo_model(folder / "demo" / "tiny-llama", train)
        given = ("--model", str(model), "--dataset", str(train), "--output_dir", str(folder))
        for number in range(1, arguments.rounds + 1):
            for what, code in PROCESSES.items():
                row = {"round": number, "process": what} | process(code, [*PLAN, *given])
                yield row
        for row in (*calls(model, train, folder), supervisor(folder)):
            yield row


def process(code: str, argv: list[str]) -> Row:
    """Run code with `argv` in a fresh Python: wall and processor seconds, peak memory."""
    begun = time.monotonic()
    started = subprocess.Popen(
        [sys.executable, "-c", PEAK + code, *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stderr is not None
    said = started.stderr.read()
    _, status, usage = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    assert started.returncode == 0, said
    return {
        "wall_s": round(time.monotonic() - begun, 3),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_mb": round(int(said.rsplit("VmHWM:", 1)[1].split()[0]) * 1024 / 1e6, 1),
    }


def calls(model: Path, train: Path, folder: Path) -> list[Row]:
    """Detect, plan, validate, and find prepared data, each `REPEATS` times."""
    values = demo_parameters("zero2", folder) | {"model": str(model), "dataset": str(train)}
    spec = parse_spec(values)
    hardware = detect("cpu", [str(folder)])
    rows = prepare_data(spec).train_rows
    plan = make_plan(spec, hardware, rows, 1)
    done: dict[str, Callable[[], Any]] = {
        "parse the spec": lambda: parse_spec(values),
        "detect hardware": lambda: detect("cpu", [str(folder)]),
        "find prepared data": lambda: prepare_data(spec),
        "make the plan": lambda: make_plan(spec, hardware, rows, 1),
        "validate, about 200 rules": lambda: validate(spec, hardware, plan),
    }
    return [{"call": what, "seconds": repeated(call)} for what, call in done.items()]


def repeated(call: Callable[[], Any]) -> dict[str, float]:
    """Return the smallest time of a call, the median and the largest."""
    call()
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return {"min": min(times), "median": statistics.median(times), "max": max(times)}


def supervisor(folder: Path) -> Row:
    """Launch two light ranks for two seconds; what their supervisor took."""
    outcome = launch(light_plan(folder, "light", 2, steps=20, seconds=0.1))
    assert outcome.exit_code == 0, outcome
    return {
        "supervisor_mb": round(outcome.receipt["supervisor_peak_bytes"] / 1e6, 1),
        "supervisor_cpu_s": outcome.receipt["supervisor_cpu_s"],
        "seconds": round(outcome.seconds, 2),
    }


def summary(result: Result) -> list[dict[str, Any]]:
    """Return the least of every process's figures over the rounds: other load can only add to them."""
    found = []
    for what in PROCESSES:
        rows = [row for row in result.rows if row.get("process") == what]
        if rows:
            least = {key: min(row[key] for row in rows) for key in ("wall_s", "cpu_s", "peak_mb")}
            found.append({"process": what, "rounds": len(rows)} | least)
    return found
