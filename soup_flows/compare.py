"""The same job under several presets, side by side: what each run measured, as rows and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from soup_flows.errors import SoupFlowsError, TrainingFailed
from soup_flows.launch.events import read_events
from soup_flows.markdown import table
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from soup_flows.units import gib

WARM_UP_STEPS = 1
"""Optimizer steps that are left out of the speed: the first one builds buffers and compiles kernels."""


class Compared(BaseModel):
    """What one preset measured; None where it did not get so far."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: str
    state: str
    """`completed`, or why not."""
    strategy: str | None = None
    final_loss: float | None = None
    eval_loss: float | None = None
    tokens_per_second: float | None = None
    """Over all ranks, without the first step."""
    host_peak_bytes: int | None = None
    """Of the rank that needed most."""
    device_peak_bytes: int | None = None
    seconds: float | None = None
    """Wall time of the run, start and saving included."""
    gpu_hours: float | None = None
    cost: float | None = None
    run_dir: str = ""


def measured(preset: str, outcome: TrainReport | SoupFlowsError) -> Compared:
    """Return the row of a run.

    Args:
        preset: what was asked.
        outcome: its report, or what it raised.
    """
    if isinstance(outcome, TrainingFailed) and outcome.run_dir:
        return measured(preset, TrainReport.load(outcome.run_dir))
    if not isinstance(outcome, TrainReport):
        return Compared(preset=preset, state=str(outcome).splitlines()[0])
    costs = [row.cost for row in outcome.ledger if row.cost is not None]
    device = [m.device_peak_reserved_bytes for m in outcome.memory if m.device_peak_reserved_bytes]
    return Compared(
        preset=preset,
        state=outcome.state if outcome.state == "completed" else f"{outcome.failure_class}: {outcome.cause}",
        strategy=outcome.plan.strategy if outcome.plan else None,
        final_loss=outcome.final_loss,
        eval_loss=outcome.eval_loss,
        tokens_per_second=tokens_per_second(RunPaths(Path(outcome.run_dir)), outcome.attempts),
        host_peak_bytes=max((m.host_peak_bytes for m in outcome.memory), default=None),
        device_peak_bytes=max(device, default=None),
        seconds=sum(row.seconds for row in outcome.ledger) or outcome.seconds,
        gpu_hours=sum(row.gpu_hours for row in outcome.ledger) if outcome.ledger else None,
        cost=sum(costs) if costs else None,
        run_dir=outcome.run_dir,
    )


def tokens_per_second(paths: RunPaths, attempt: int) -> float | None:
    """Return the tokens that all ranks passed through the model per second, from the attempt's events."""
    tokens: dict[int, int] = {}
    slowest: dict[int, float] = {}
    for event in read_events(paths.attempt(attempt).events):
        if event.get("kind") == "step":
            step = int(event["step"])
            tokens[step] = tokens.get(step, 0) + int(event.get("tokens") or 0)
            slowest[step] = max(slowest.get(step, 0.0), float(event["seconds"]))
    counted = sorted(tokens)[WARM_UP_STEPS:]
    seconds = sum(slowest[step] for step in counted)
    return sum(tokens[step] for step in counted) / seconds if seconds else None


def comparison_page(rows: Sequence[Compared]) -> str:
    """Return the page `soup-train-comparison`: a sentence with the fastest, a table, where the runs are."""
    fastest = max(
        (r for r in rows if r.tokens_per_second), key=lambda r: r.tokens_per_second or 0, default=None
    )
    parts = [f"# {len(rows)} presets compared"]
    if fastest is not None:
        parts.append(f"Fastest: **{fastest.preset}**, {fastest.tokens_per_second:,.0f} tokens/s.")
    head = ("preset", "ended", "loss", "held-out loss", "tokens/s", "GPU peak", "host peak", "wall time",
            "GPU-hours", "cost")  # fmt: skip
    parts.append(table(head, [_cells(row) for row in rows]))
    where = [f"- {row.preset}: `{row.run_dir}`" for row in rows if row.run_dir]
    if where:
        parts.append("Runs:\n\n" + "\n".join(where))
    return "\n\n".join(parts) + "\n"


def _cells(row: Compared) -> tuple[object, ...]:
    def number(value: float | None, form: str) -> str | None:
        return None if value is None else format(value, form)

    name = row.preset if row.strategy in (None, row.preset) else f"{row.preset} (ran {row.strategy})"
    return (
        name,
        row.state,
        number(row.final_loss, ".4g"),
        number(row.eval_loss, ".4g"),
        number(row.tokens_per_second, ",.0f"),
        None if row.device_peak_bytes is None else gib(row.device_peak_bytes, 2),
        None if row.host_peak_bytes is None else gib(row.host_peak_bytes, 2),
        None if row.seconds is None else f"{row.seconds:.0f} s",
        number(row.gpu_hours, ".3f"),
        number(row.cost, ".2f"),
    )
