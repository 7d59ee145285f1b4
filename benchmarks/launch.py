"""From the start of a command to the end of the first optimizer step, against other launchers, in turn.

Model, rows, ranks and threads are the same. `ours` calls the tasks, `flow` is the whole flow with a Prefect server
that runs already, `seen` calls the tasks with new rows for a model that an earlier run has seen, as every night. Two
steps are made (Soup has no such setting and trains all rows); what comes after the first one does not count. A flow's
own start, after Prefect is imported, is where a worker's user begins to wait: the phases have it apart.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.assets import make_assets
from benchmarks.harness import Result, Row, keep, largest, load, spread
from benchmarks.peers import PEERS, peer_versions, run_peer
from benchmarks.throughput import add_choice, chosen
from soup_flows.drill.server import Site

ORDER = ("ours", "seen", "flow", "padded", "accelerate", "llama-factory", "soup")
STEPS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--rows", type=int, default=200, help="questions with their answers")
    parser.add_argument("--rounds", type=int, default=3)
    add_choice(parser, ORDER)


def run(arguments: argparse.Namespace) -> Result:
    """Start every launcher once a round, one after the other."""
    versions = peer_versions(chosen(arguments), arguments.peers)
    return keep("launch", _rows(arguments), add=arguments.add, more_versions=versions)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    names = chosen(arguments)
    assets = arguments.work / f"chat-{arguments.rows}"
    make_assets(assets, arguments.rows)
    if "seen" in names and not list(assets.glob("seen/look/model-*")):
        _once("seen", assets, arguments.peers)
    before = load("launch") if arguments.add else None
    first = 1 + max((row["round"] for row in before.rows), default=0) if before else 1
    for number in range(first, first + arguments.rounds):
        for name in names:
            row: Row = {"round": number, "rows": arguments.rows} | _once(name, assets, arguments.peers)
            yield row


def _once(name: str, assets: Path, peers: Path) -> Row:
    """Start one launcher; a server is started before the flow, and ended after it."""
    if name != "flow":
        return run_peer(name, assets, peers, steps=STEPS)
    with Site.start() as site:
        before = {key: os.environ.get(key) for key in ("PREFECT_API_URL", "PREFECT_HOME")}
        os.environ |= {"PREFECT_API_URL": site.url, "PREFECT_HOME": str(site.home)}
        try:
            return run_peer(name, assets, peers, steps=STEPS)
        finally:
            for key, value in before.items():
                os.environ.pop(key)
                if value is not None:
                    os.environ[key] = value


def phase_seconds(phases: dict[str, float]) -> dict[str, float]:
    """Return how long each phase took: from its own beginning to that of the next one."""
    ordered = sorted(phases.items(), key=lambda item: item[1])
    pairs = itertools.pairwise(ordered)
    return {name: round(after - begun, 3) for (name, begun), (_, after) in pairs}


def from_flow_start(phases: dict[str, float]) -> float:
    """Return the seconds from the start of the flow, or of its first task, to the end of the first step."""
    return phases["first step is done"] - phases.get("flow", phases.get("detect hardware", 0.0))


def summary(result: Result) -> list[dict[str, Any]]:
    """Return one row per launcher: spreads of the figures and the medians of the phases, or why there are none."""
    found: list[dict[str, Any]] = []
    for name in ORDER:
        rows = [row for row in largest(result) if row["run"] == name]
        good = [row for row in rows if "first_step_s" in row]
        line: dict[str, Any] = {"run": name, "label": PEERS[name].label, "runs": len(good)}
        if good:
            line |= {
                key: spread([row[key] for row in good]) for key in ("first_step_s", "start_cpu_s", "cpu_s")
            }
            taken = [phase_seconds(row["phases"]) for row in good if "phases" in row]
            if taken:
                line["from_flow_start_s"] = spread([from_flow_start(row["phases"]) for row in good])
                line["phases"] = {key: median(t[key] for t in taken if key in t) for key in taken[0]}
        elif rows:
            line["why"] = rows[-1]["why"]
        if rows:
            found.append(line)
    return found
