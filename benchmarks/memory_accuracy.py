"""Measure the memory predictor: `python benchmarks/memory_accuracy.py --rows FILE.csv [--json]`.

FILE holds published measurements in the columns of `tests/data/memory_measured.csv`. Rows with unknown values
are skipped and counted. Errors are (predicted - measured) / measured, in percent. Every group also says what
accelerate's and DeepSpeed's estimators give on its rows of full training.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # a script's own folder is there, the checkout is not

from benchmarks.memory_baselines import BASELINES
from benchmarks.memory_rows import Row, read

Figure = Callable[[Row], float]


def scope(*names: str) -> Callable[[Row], bool]:
    """Return a filter on the `scope` column."""
    return lambda row: row.cells.get("scope", "") in names


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each group that is judged by its errors."""
    measured = [row for row in rows if row.measured]
    core = [row for row in measured if scope("core")(row)]
    allocated = [row for row in core if row.kind == "allocated"]
    found = {
        "core_allocated": allocated,
        "core_reserved": [row for row in core if row.kind in ("reserved", "device")],
        "zero": [row for row in core if row.setup.zero_stage and not row.setup.offloaded],
        "offload": [
            row
            for row in measured
            if row.setup.offloaded and scope("core", "core_old_bnb", "context_units_unclear")(row)
        ],
        "zero_units_unclear": [
            row
            for row in measured
            if row.setup.zero_stage and not row.setup.offloaded and scope("context_units_unclear")(row)
        ],
    }
    for method in ("full", "lora", "qlora"):
        found[f"core_allocated_{method}"] = [row for row in allocated if row.setup.method == method]
    found["core_allocated_single"] = [row for row in allocated if row.setup.world_size == 1]
    found["core_allocated_multi"] = [row for row in allocated if row.setup.world_size > 1]
    for name in sorted({row.cells.get("scope", "") for row in measured} - {"core", ""}):
        found[f"scope_{name}"] = [row for row in measured if scope(name)(row)]
    return {name: chosen for name, chosen in found.items() if chosen or not name.startswith("scope_")}


def errors(rows: Sequence[Row], figure: Figure) -> list[float]:
    """Return the relative errors of `figure`."""
    return [figure(row) / row.measured - 1 for row in rows if row.measured]


def summary(rows: Sequence[Row], figure: Figure) -> dict[str, Any]:
    """Return n, mape, bias, within_10, within_20, worst_under and worst_over, all but n in percent."""
    found = errors(rows, figure)
    if not found:
        names = ("mape", "bias", "within_10", "within_20", "worst_under", "worst_over")
        return {"n": 0, **dict.fromkeys(names)}
    return {
        "n": len(found),
        "mape": round(100 * mean(map(abs, found)), 2),
        "bias": round(100 * mean(found), 2),
        "within_10": round(100 * mean(abs(e) <= 0.10 for e in found), 1),
        "within_20": round(100 * mean(abs(e) <= 0.20 for e in found), 1),
        "worst_under": round(100 * min(0.0, *found), 1),
        "worst_over": round(100 * max(0.0, *found), 1),
    }


def judged(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary of a group, what its stated requirement covers, and the other estimators."""
    found = summary(rows, lambda row: row.predicted)
    if rows:
        covered = [row.estimate.required_bytes >= (row.measured or 0) for row in rows]
        inside = [_in_range(row) for row in rows]
        full = [row for row in rows if row.setup.method == "full"]
        late = [
            e < -0.10 and row.estimate.confidence != "low"
            for e, row in zip(errors(rows, _own), rows, strict=True)
        ]
        found |= {
            "required_covers": round(100 * mean(covered), 1),
            "in_range": round(100 * mean(inside), 1),
            "under_10_not_low": sum(late),
            "confidence": dict(Counter(row.estimate.confidence for row in rows)),
            "baselines": {name: summary(full, figure) for name, figure in BASELINES.items()},
        }
    return found


def _own(row: Row) -> float:
    return row.predicted


def _in_range(row: Row) -> bool:
    """Say whether the measured peak lies in the stated range, moved to the kind of the measurement."""
    factor = row.predicted / row.estimate.allocated_bytes
    measured = row.measured or 0.0
    return row.estimate.low_bytes * factor <= measured <= row.estimate.high_bytes * factor


def decisions(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how the rule "required fits on the card" decides about runs that failed and runs that ran.

    Failed runs are those recorded as out of memory under complete conditions. Good runs come from the same
    sources, since only a source that records its failures shows both sides.
    """
    known = [row for row in rows if row.device_bytes]
    failed = [row for row in known if row.oom and scope("oom_check", "core")(row)]
    sources = {row.cells.get("source") for row in failed}
    good = [
        row
        for row in known
        if row.measured and scope("core", "legacy_fsdp1_peft")(row) and row.cells.get("source") in sources
    ]

    def fits(row: Row) -> bool:
        return row.estimate.fits(int(row.device_bytes or 0))

    accepted = [row.cells.get("id", "?") for row in failed if fits(row)]
    refused = [row.cells.get("id", "?") for row in good if not fits(row)]
    return {
        "n": len(failed) + len(good),
        "failed": len(failed),
        "good": len(good),
        "accepted": len(accepted),
        "refused_good": len(refused),
        "refused_good_percent": round(100 * len(refused) / len(good), 1) if good else None,
        "accepted_ids": accepted,
        "refused_ids": refused,
        "within_margin": summary(good, _own) | {"note": "errors on the good runs"},
    }


def report(path: Path) -> dict[str, Any]:
    """Return everything about a file of rows, ready for JSON."""
    rows, skipped = read(path)
    return {
        "rows": len(rows) + len(skipped),
        "predicted": len(rows),
        "skipped": len(skipped),
        "skipped_why": dict(Counter(reason for _, reason in skipped).most_common()),
        "groups": {name: judged(chosen) for name, chosen in groups(rows).items()} | {"oom": decisions(rows)},
    }


def table(found: dict[str, Any]) -> str:
    """Return the report as text."""
    names = ("mape", "bias", "<=10%", "<=20%", "under", "over", "covered")
    head = f"{'group':30}{'n':>4}" + "".join(f"{name:>8}" for name in names)
    lines = [f"{found['rows']} rows, {found['predicted']} predicted, {found['skipped']} skipped", "", head]

    def line(name: str, row: dict[str, Any]) -> str:
        keys = ("mape", "bias", "within_10", "within_20", "worst_under", "worst_over", "required_covers")
        cells = "".join("       -" if row.get(k) is None else f"{row[k]:8.1f}" for k in keys)
        return f"{name:30}{row['n']:4}{cells}"

    for name, row in found["groups"].items():
        if name == "oom" or not row["n"]:
            continue
        lines.append(line(name, row))
        for other, figures in row["baselines"].items():
            if figures["n"]:
                lines.append(line(f"    {other} (full)", figures))
    oom = found["groups"]["oom"]
    lines += [
        "",
        f"out of memory: {oom['accepted']} of {oom['failed']} failed runs accepted, "
        f"{oom['refused_good']} of {oom['good']} good runs refused ({oom['refused_good_percent']} %)",
        "",
        "skipped: " + "; ".join(f"{count} x {why}" for why, count in found["skipped_why"].items()),
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=Path, required=True, help="CSV with the columns of memory_measured.csv"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        found = report(options.rows)
    except (OSError, ValueError) as error:
        print(f"memory_accuracy: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2) if options.json else table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
