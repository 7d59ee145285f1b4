"""Cost against work: ranks, printed lines, kept runs, flows at once; the exponent says how cost grows.

Ranks are light: they beat, write events and print, and do not train. 1 is linear, 0 is no growth at all. How data
rows scale is in `prepare`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, Row, exponent, keep
from benchmarks.light import light_flow, light_plan
from soup_flows.drill.server import Site, wait_for
from soup_flows.launch.events import tail_events
from soup_flows.launch.leases import LEASE_DIR
from soup_flows.launch.run import run as launch
from soup_flows.paths import RunPaths
from soup_flows.recovery import begin
from soup_flows.report import TrainReport
from soup_flows.resume import Orders
from soup_flows.spec import parse_spec

SIZES = {
    "ranks": (1, 2, 4, 8, 16, 32, 64),
    "lines": (1_000, 10_000, 100_000, 1_000_000),
    "runs": (1, 10, 100, 1_000),
    "flows": (1, 2, 5, 10, 20),
}
FIGURES = {
    "ranks": ("start_s", "supervisor_cpu_s", "supervisor_mb", "end_s"),
    "lines": ("wall_s", "supervisor_cpu_s", "supervisor_mb"),
    "runs": ("begin_s",),
    "flows": ("all_done_s", "server_cpu_s"),
}
FLOWS_LIMIT_S = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument(
        "--only", default=",".join(SIZES), metavar="NAMES", help="comma separated: %(default)s"
    )
    parser.add_argument("--most", type=int, help="leave larger sizes out")
    parser.add_argument("--rounds", type=int, default=1)


def run(arguments: argparse.Namespace) -> Result:
    """Measure every size of every kind."""
    return keep("scale", _rows(arguments), add=arguments.add)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    kinds = arguments.only.split(",")
    if unknown := sorted(set(kinds) - set(SIZES)):
        raise ValueError(f"--only: there is no {', '.join(unknown)}; there are {', '.join(SIZES)}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        os.environ[LEASE_DIR] = f"{name}/leases"
        for kind in kinds:
            sizes = [size for size in SIZES[kind] if size <= (arguments.most or size)]
            for number in range(arguments.rounds):
                for row in MEASURES[kind](Path(name) / f"{kind}-{number}", sizes):
                    yield {"kind": kind} | row


def launched(folder: Path, ranks: int, **how: Any) -> Row:
    """Launch light ranks; returns seconds to the last one's start and from the last one's end, and what it took."""
    plan = light_plan(folder, "light", ranks, **how)
    begun = time.time()
    outcome = launch(plan)
    ended = time.time()
    assert outcome.exit_code == 0, outcome
    assert outcome.receipt["log_bytes_lost"] == 0, outcome
    events = tail_events(plan.attempt_paths.events).poll()
    times = {kind: [e["time"] for e in events if e["kind"] == kind] for kind in ("started", "left")}
    assert len(times["left"]) == ranks, times
    shutil.rmtree(folder)
    return {
        "start_s": round(max(times["started"]) - begun, 3),
        "end_s": round(ended - max(times["left"]), 3),
        "wall_s": round(ended - begun, 3),
        "supervisor_cpu_s": outcome.receipt["supervisor_cpu_s"],
        "supervisor_mb": round(outcome.receipt["supervisor_peak_bytes"] / 1e6, 1),
    }


def by_ranks(folder: Path, sizes: Sequence[int]) -> list[Row]:
    """Launch more and more ranks."""
    return [{"size": size} | launched(folder / str(size), size) for size in sizes]


def by_lines(folder: Path, sizes: Sequence[int]) -> list[Row]:
    """Let two ranks print more and more lines, as fast as they can."""
    return [
        {"size": size} | launched(folder / str(size), 2, steps=10, seconds=0.0, lines=size // 2)
        for size in sizes
    ]


def by_runs(folder: Path, sizes: Sequence[int]) -> list[Row]:
    """Begin a run that looks among more and more kept ones for an equal one."""
    data = folder / "rows.jsonl"
    folder.mkdir(parents=True)
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    values = {"model": "m", "dataset": str(data), "output_dir": str(folder), "recovery": {"reuse": "any"}}
    spec, rows, made = parse_spec(values), [], 0
    for size in sizes:
        for made in range(made, size):  # noqa: B020 (goes on from the runs that are there)
            paths = RunPaths.of(folder, f"run-{made}").create()
            paths.orders.write_text(Orders(work_hash=f"{made:064x}").model_dump_json())
            TrainReport(run_id=f"run-{made}", run_dir=str(paths.root), state="failed").save()
        made = size
        begun = time.perf_counter()
        begin(spec, RunPaths.of(folder, "new").create())
        rows.append({"size": size, "begin_s": round(time.perf_counter() - begun, 4)})
    return rows


def by_flows(folder: Path, sizes: Sequence[int]) -> list[Row]:
    """Start more and more flows at once on one server and one worker, each with two light ranks."""
    rows = []
    with Site.start() as site:
        for size in sizes:
            begun, cpu = time.monotonic(), _cpu_s(site)
            runs = [site.submit(light_flow, {"output_dir": str(folder)}) for _ in range(size)]
            done: Callable[[], bool] = lambda ids=runs: all(site.state(i).is_final() for i in ids)  # noqa: E731
            wait_for(done, FLOWS_LIMIT_S, "the flows")
            seconds = time.monotonic() - begun
            failed = sum(not site.state(i).is_completed() for i in runs)
            row = {"size": size, "all_done_s": round(seconds, 2), "failed": failed}
            rows.append(row | {"server_cpu_s": round(_cpu_s(site) - cpu, 2)})
    return rows


def _cpu_s(site: Site) -> float:
    """Return the server's own processor time so far."""
    assert site.server is not None
    fields = Path(f"/proc/{site.server.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


MEASURES: dict[str, Callable[[Path, Sequence[int]], list[Row]]] = {
    "ranks": by_ranks,
    "lines": by_lines,
    "runs": by_runs,
    "flows": by_flows,
}


def summary(result: Result) -> list[dict[str, Any]]:
    """Return one row per kind and figure: size -> the least figure, and the exponent."""
    found = []
    for kind, figures in FIGURES.items():
        rows = [row for row in result.rows if row["kind"] == kind]
        for figure in figures if rows else ():
            least: dict[int, float] = {}
            for row in rows:
                least[row["size"]] = min(row[figure], least.get(row["size"], row[figure]))
            line: dict[str, Any] = {"kind": kind, "figure": figure, "by_size": dict(sorted(least.items()))}
            known = {size: cost for size, cost in least.items() if cost > 0}
            if len(known) > 1:
                line["exponent"] = round(exponent(list(known), list(known.values())), 2)
            found.append(line)
    return found
