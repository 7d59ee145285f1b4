"""What supervision costs against plain torchrun: time to the first rank's first line, time per step, memory.

Both start the same program on two CPU ranks, in turn, in one run of this script, so that a loaded machine slows
both. The program prints a line first, then makes steps that compute for a while and meet in a collective, and
prints as many lines as are asked for. Under supervision each step also beats and writes an event, as the rank
program does; the run is started as the task does it, with a lease, and its lines and events are followed.
Plain torchrun writes to a file.

The best of a kind is its least disturbed run; where nothing else runs on the machine, it and the median agree.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from benchmarks.harness import Result, Row, keep, spread
from soup_flows.attempt import run_attempt
from soup_flows.launch.elastic import elastic_argv
from soup_flows.launch.leases import LEASE_DIR
from soup_flows.launch.plan import PACKAGE_ROOT, LeaseSettings, build_launch_plan
from soup_flows.paths import RunPaths

RANKS = 2
PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
out, steps, lines_per_second = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) / 60
from soup_flows.launch import rank
supervised = rank.attach()
me = rank.rank_number()
print("first line", flush=True)
first = time.time()
import json, pathlib, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
events = rank.EventWriter(rank.attempt_dir() / "events.jsonl", me) if supervised else None
a, flag = torch.randn(384, 384), torch.zeros(1)
dist.barrier()
times, printed, start = [], 0, time.perf_counter()
for step in range(1, steps + 1):
    begun = time.perf_counter()
    for _ in range(12):
        a = torch.tanh(a @ a)
    dist.all_reduce(flag)
    print(f"step {{step}}/{{steps}} loss 1.234", flush=True)
    for printed in range(printed, int((begun - start) * lines_per_second)):
        print("flood", printed, "x" * 80)
    if supervised:
        rank.heartbeat(step)
        events.write("step", step=step, seconds=times[-1] if times else 0.0)
    times.append(time.perf_counter() - begun)
dist.destroy_process_group()
if me == 0:
    found = {{"first": first, "times": times[steps // 10:], "lines": printed}}
    pathlib.Path(out).write_text(json.dumps(found))
"""


def plain(program: Path, out: Path, arguments: list[str]) -> dict[str, float]:
    """Run the program under torchrun alone."""
    argv = elastic_argv(f"plain-{uuid4().hex[:8]}", RANKS, 20.0, str(program), str(out), *arguments)
    begun = time.time()
    with (out.parent / "plain.log").open("ab") as log:
        subprocess.run(argv, check=True, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return measured(out, begun)


def supervised(program: Path, out: Path, arguments: list[str]) -> dict[str, float]:
    """Run the program as an attempt of a run."""
    run_id = f"bench-{uuid4().hex[:8]}"
    paths = RunPaths.of(out.parent, run_id).create()
    plan = build_launch_plan(
        paths=paths,
        run_id=run_id,
        attempt=1,
        nproc_per_node=RANKS,
        device="cpu",
        config_path=None,
        omp_num_threads=1,
        stop_budget_s=20.0,
        timeout_s=None,
        lease=LeaseSettings(kind="core"),
    )
    argv = elastic_argv(run_id, RANKS, 20.0, str(program), str(out), *arguments)
    begun = time.time()
    outcome = run_attempt(plan.model_copy(update={"argv": argv}), logging.getLogger("bench"), lambda: None)
    assert outcome.exit_code == 0, outcome
    found = measured(out, begun)
    found["supervisor_mb"] = outcome.receipt["supervisor_peak_bytes"] / 1e6
    found["supervisor_cpu_share"] = outcome.receipt["supervisor_cpu_s"] / outcome.receipt["seconds"]
    assert outcome.receipt["log_bytes_lost"] == 0, outcome
    return found


def measured(out: Path, begun: float) -> dict[str, float]:
    """Return seconds from the start to the first line, the steps in seconds, and the lines that were printed."""
    value = json.loads(out.read_text())
    out.unlink()
    times = value["times"]
    return {
        "start_s": value["first"] - begun,
        "step_s": statistics.quantiles(times, n=10)[0],
        "step_median_s": statistics.median(times),
        "step_mean_s": statistics.mean(times),
        "lines": value["lines"],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lines-per-minute", type=int, default=0, help="that every rank prints")


def run(arguments: argparse.Namespace) -> Result:
    """Run the pairs, plain and supervised in turn."""
    return keep("supervision", _rows(arguments), add=arguments.add)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    with TemporaryDirectory() as temporary:
        os.environ[LEASE_DIR] = f"{temporary}/leases"
        program, out = Path(temporary) / "program.py", Path(temporary) / "out.json"
        program.write_text(PROGRAM.format(root=PACKAGE_ROOT))
        given = [str(arguments.steps), str(arguments.lines_per_minute)]
        for pair in range(arguments.pairs):
            order = (plain, supervised) if pair % 2 == 0 else (supervised, plain)
            row: Row = {"steps": arguments.steps, "lines_per_minute": arguments.lines_per_minute}
            row |= {kind.__name__: kind(program, out, given) for kind in order}
            yield row


def summary(result: Result) -> list[dict[str, Any]]:
    """Return what supervision adds, by the lines that every rank printed a minute."""
    found = []
    for lines in sorted({row["lines_per_minute"] for row in result.rows}):
        rows = [row for row in result.rows if row["lines_per_minute"] == lines]
        starts = [row["supervised"]["start_s"] - row["plain"]["start_s"] for row in rows]
        steps = [row["supervised"]["step_mean_s"] / row["plain"]["step_mean_s"] - 1 for row in rows]
        found.append(
            {
                "lines_per_minute": lines,
                "pairs": len(rows),
                "added_start_s": spread(starts),
                "added_start_best_s": best(rows, "supervised", "start_s") - best(rows, "plain", "start_s"),
                "added_step_share": spread(steps),
                "supervisor_mb": max(row["supervised"]["supervisor_mb"] for row in rows),
                "supervisor_cpu_share": spread([row["supervised"]["supervisor_cpu_share"] for row in rows]),
            }
        )
    return found


def best(rows: list[Row], kind: str, name: str) -> float:
    """Return the smallest value, which other load on the machine has disturbed least."""
    return min(float(row[kind][name]) for row in rows)
