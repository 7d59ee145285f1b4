"""The page of a run's attempts, and the table of them in its report."""

from __future__ import annotations

from collections.abc import Sequence

from soup_flows.ledger import Attempt
from soup_flows.markdown import table
from soup_flows.report import TrainReport


def attempts_page(report: TrainReport, decision: str = "") -> str:
    """Return the page `soup-train-attempts`: every attempt, why it ended, what it cost, what comes next."""
    text = f"# Attempts of run {report.run_id}\n\n{attempts_table(report)}"
    path = report.ledger[-1].change.path if report.ledger else ()
    if path:
        text += "\n\n## What was changed\n\n" + "\n".join(f"{n}. {line}" for n, line in enumerate(path, 1))
    return text + (f"\n\nAfter the last one: {decision}\n" if decision else "\n")


def attempts_table(report: TrainReport) -> str:
    """Return the ledger as a table, with the causes below it: a column of them would be a few letters wide."""
    rows = [
        (
            row.number,
            row.state + (f": {row.failure_class}" if row.failure_class else ""),
            f"{row.from_step} → {row.last_step}",
            row.steps_lost,
            f"{row.seconds:.0f} s",
            f"{row.gpu_hours:.3f}",
            f"{row.gpu_hours_wasted:.3f}",
            None if row.cost is None else f"{row.cost:.2f}",
            _kwh(row.energy_joules),
        )
        for row in report.ledger
    ]
    head = ("attempt", "ended", "steps", "steps lost", "wall time", "GPU-hours", "wasted", "cost", "energy")
    parts = [table(head, rows)]
    if len(rows) > 1:
        parts.append(_spent(report.ledger))
    causes = [
        f"- Attempt {row.number}: {row.cause or 'no cause was found'}"
        + (f" (`{row.evidence}`)" if row.evidence else "")
        for row in report.ledger
        if row.failure_class
    ]
    return "\n\n".join([*parts, *(["\n".join(causes)] if causes else [])])


def _spent(rows: Sequence[Attempt]) -> str:
    """Say in one line what all attempts cost together; what was not measured for all of them is left out."""
    hours, wasted = sum(row.gpu_hours for row in rows), sum(row.gpu_hours_wasted for row in rows)
    parts = [f"{hours:.3f} GPU-hours ({wasted:.3f} wasted)"]
    costs = [row.cost for row in rows if row.cost is not None]
    joules = [row.energy_joules for row in rows if row.energy_joules is not None]
    if costs:
        parts.append(f"cost {sum(costs):.2f}")
    if joules:
        of = "" if len(joules) == len(rows) else f" in {len(joules)} of {len(rows)} attempts"
        parts.append(f"{_kwh(sum(joules))}{of}")
    return "All attempts: " + ", ".join(parts) + "."


def _kwh(joules: float | None) -> str | None:
    """Format energy; a kilowatt-hour is 3.6 million joules."""
    return None if joules is None else f"{joules / 3.6e6:.3g} kWh"
