"""Real tokens per second and per processor second, against other trainers on the same rows, in turn.

Every run has two CPU ranks of one thread, fp32, one epoch, and saves no checkpoint. Padded runs have 8 rows a rank
and step, packed ones 2 packs of 512 tokens, so that a step has about as many tokens. Tokens that are no padding are
counted inside `Trainer.training_step` by a hook that changes nothing else. A rank's processor time is steadier than
the wall clock where other programs run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.assets import make_assets
from benchmarks.harness import ROOT, Result, Row, keep, largest, load, spread
from benchmarks.peers import PEERS, peer_versions, run_peer

ORDER = ("ours", "grouped", "llama-factory", "soup", "trl", "padded")
GOALS = {"grouped": 1.15, "llama-factory": 1.35, "soup": 1.6, "trl": 2.2, "padded": 2.9}
"""Least ratio of real tokens per processor second, ours to a peer's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--rows", type=int, default=2000, help="questions with their answers")
    parser.add_argument("--rounds", type=int, default=3)
    add_choice(parser, ORDER)


def add_choice(parser: argparse.ArgumentParser, order: tuple[str, ...]) -> None:
    """Let peers be chosen, and where they are installed."""
    parser.add_argument(
        "--only", default=",".join(order), metavar="NAMES", help="comma separated: %(default)s"
    )
    place = ROOT / "build" / "benchmarks" / "peers"
    parser.add_argument(
        "--peers", type=Path, default=place, metavar="DIR", help="environments, made when missing"
    )


def chosen(arguments: argparse.Namespace) -> list[str]:
    """Return the peers that were chosen.

    Raises:
        ValueError: for a name that is none.
    """
    names: list[str] = arguments.only.split(",")
    if unknown := sorted(set(names) - set(PEERS)):
        raise ValueError(f"--only: there is no {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return names


def run(arguments: argparse.Namespace) -> Result:
    """Run every peer once a round, one after the other."""
    versions = peer_versions(chosen(arguments), arguments.peers)
    return keep("throughput", _rows(arguments), add=arguments.add, more_versions=versions)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    names = chosen(arguments)
    assets = arguments.work / f"chat-{arguments.rows}"
    stats = make_assets(assets, arguments.rows)
    before = load("throughput") if arguments.add else None
    first = 1 + max((row["round"] for row in before.rows), default=0) if before else 1
    for number in range(first, first + arguments.rounds):
        for name in names:
            row: Row = {"round": number, "rows": arguments.rows} | run_peer(name, assets, arguments.peers)
            if "real_tokens" in row:
                row["coverage"] = round(row["real_tokens"] / stats["tokens"], 4)
            yield row


def ratios(result: Result, figure: str) -> dict[str, float]:
    """Return ours / theirs of each peer, from the medians of the rounds that have both."""
    found = {}
    runs = largest(result)
    for peer in ORDER[1:]:
        pairs: list[tuple[float, float]] = []
        for number in sorted({row["round"] for row in runs}):
            of = {row["run"]: row[figure] for row in runs if row["round"] == number and figure in row}
            if "ours" in of and peer in of:
                pairs.append((of["ours"], of[peer]))
        if pairs:
            found[peer] = median(a for a, _ in pairs) / median(b for _, b in pairs)
    return found


def summary(result: Result) -> list[dict[str, Any]]:
    """Return one row per peer: spreads of the figures, or why there are none."""
    found: list[dict[str, Any]] = []
    figures = ("tokens_per_cpu_s", "tokens_per_s", "train_s", "first_step_s", "wall_s", "max_rss_mb")
    for name in ORDER:
        rows = [row for row in largest(result) if row["run"] == name]
        good = [row for row in rows if "tokens_per_s" in row]
        line: dict[str, Any] = {"run": name, "label": PEERS[name].label, "runs": len(good)}
        if good:
            line |= {figure: spread([row[figure] for row in good]) for figure in figures}
            line |= {key: good[-1][key] for key in ("padding_share", "steps", "loss", "coverage")}
        elif rows:
            line["why"] = rows[-1]["why"]
        if rows:
            found.append(line)
    return found
