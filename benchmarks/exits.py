"""How many finished runs exit 0: tiny runs on two ranks, one after the other, each trained to its end."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benchmarks.assets import make_assets
from benchmarks.harness import Result, Row, keep
from benchmarks.peers import run_peer

ROWS, STEPS = 100, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--runs", type=int, default=100)


def run(arguments: argparse.Namespace) -> Result:
    """Train again and again."""
    return keep("exits", _rows(arguments), add=arguments.add)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    assets = arguments.work / f"chat-{ROWS}"
    make_assets(assets, ROWS)
    for _ in range(arguments.runs):
        found = run_peer("ours", assets, arguments.work, steps=STEPS)
        row = {key: found.get(key) for key in ("exit_code", "steps", "wall_s", "load", "why") if key in found}
        yield row


def summary(result: Result) -> dict[str, int]:
    """Return the runs that trained to their end, and those of them that exited 0."""
    done = [row for row in result.rows if row.get("steps") == STEPS]
    return {"runs": len(result.rows), "finished": len(done), "exit_0": sum(r["exit_code"] == 0 for r in done)}
