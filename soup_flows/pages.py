"""Markdown pages of a run, for Prefect's page, the terminal and the run directory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from soup_flows.proof import Proof
from soup_flows.report import Point, TrainReport
from soup_flows.sharding import ShardingPlan

CHART_POINTS = 40
"""Points of a chart; more make Mermaid's labels unreadable."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a markdown table; cells are escaped, None becomes a dash."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = ("–" if cell is None else str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report_page(report: TrainReport) -> str:
    """Return the page `soup-train-report`: what ran, proof, losses, memory, where things are."""
    parts = [_head(report)]
    if report.problems:
        parts.append("## Findings before the launch\n\n" + problems_table(report))
    if report.plan is not None:
        parts.append(_what_ran(report))
    if report.proof is not None:
        parts.append(_proof(report.proof))
    if report.train:
        parts.append(_losses(report))
    if report.memory:
        parts.append(_memory(report))
    parts.append(_where(report))
    return "\n\n".join(parts) + "\n"


def _head(report: TrainReport) -> str:
    """Say in a few lines how the run ended."""
    title = {
        "completed": "completed",
        "failed": f"failed: {report.failure_class}",
        "cancelled": "cancelled",
        "refused": "refused before anything was started",
    }[report.state]
    lines = [f"# soup-train {title}"]
    if report.cause:
        lines.append(f"**{report.cause}**")
    if report.advice:
        lines.append(f"What to do: {report.advice}")
    if report.state == "completed":
        eval_text = (
            f"; held-out {_number(report.first_eval_loss)} → {_number(report.eval_loss)}"
            if report.evaluations
            else ""
        )
        lines.append(
            f"{report.steps} optimizer steps in {report.seconds:.0f} s. "
            f"Loss {_number(report.first_loss)} → {_number(report.final_loss)}{eval_text}."
        )
    return "\n\n".join(lines)


def problems_table(report: TrainReport) -> str:
    """Return the findings, errors first."""
    rows = [(p.severity, p.id, f"`{p.field}`", p.message, p.fix) for p in report.problems]
    return table(("severity", "rule", "setting", "what would happen", "fix"), rows)


def plan_rows(plan: ShardingPlan) -> list[tuple[str, object, str | None]]:
    """Return the plan's values, each automatic one with its reason."""
    batch, why = plan.batch, plan.reasons
    rows: list[tuple[str, object, str | None]] = [
        ("strategy", plan.strategy, plan.reason),
        ("ranks", f"{plan.world_size} × {plan.device}", why.get("world_size")),
        ("dtype", plan.dtype, why.get("dtype")),
        ("optimizer", plan.optimizer, why.get("optimizer")),
        (
            "gradient checkpointing",
            "on" if plan.gradient_checkpointing else "off",
            why.get("gradient_checkpointing"),
        ),
        (
            "rows per optimizer step",
            f"{batch.global_batch_size} = {batch.per_device_train_batch_size} per rank and pass "
            f"× {batch.gradient_accumulation_steps} passes × {batch.world_size} ranks",
            why.get("batch"),
        ),
        ("config", plan.config_source, None),
    ]
    if plan.memory is not None:
        rows.append(("memory of a rank", _gib(plan.memory.allocated_bytes), why.get("memory")))
    if plan.steps is not None:
        counted = f"{plan.steps.total_steps}, of them {plan.steps.warmup_steps} warm-up"
        rows.append(("optimizer steps", counted, why.get("steps")))
    return rows


def plan_text(plan: ShardingPlan) -> str:
    """Return the plan for a terminal."""
    lines = [f"{name:<24} {value}" + (f"   ({why})" if why else "") for name, value, why in plan_rows(plan)]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def _what_ran(report: TrainReport) -> str:
    """Show the plan, each automatic value with its reason."""
    plan = report.plan
    assert plan is not None
    rows: list[tuple[str, object, str | None]] = plan_rows(plan)
    if report.train_rows is not None:
        rows.append(("rows", f"{report.train_rows} trained, {report.eval_rows} held out", None))
    text = "## What ran\n\n" + table(("", "value", "why"), rows)
    if plan.notes:
        text += "\n\nNotes:\n\n" + "\n".join(f"- {note}" for note in plan.notes)
    return text


def _proof(proof: Proof) -> str:
    """Show what each rank really held."""
    verdict = (
        f"{proof.world_size} rank(s) formed the group; everything below was read from them after their first "
        "step and matches the plan."
    )
    if proof.failures:
        verdict = "**The ranks differ from the plan:**\n\n" + "\n".join(f"- {f}" for f in proof.failures)
    rows = [
        (
            r.rank,
            f"{r.host} {r.device}",
            r.wrapper + (f" stage {r.zero_stage}" if r.zero_stage else ""),
            f"{r.parameters_held:,} of {r.parameters_total:,}",
            f"{r.optimizer_held:,} of {r.trainable_total:,}",
            r.optimizer,
            ", ".join(r.dtypes),
        )
        for r in proof.ranks
    ]
    head = ("rank", "where", "wrapper", "parameters held", "optimizer state held", "optimizer", "dtype")
    return f"## Proof\n\n{verdict}\n\n{table(head, rows)}"


def _losses(report: TrainReport) -> str:
    """Chart the losses with Mermaid, and repeat them as a table for pages that do not draw it."""
    points = thin([p for p in report.train if p.loss is not None], CHART_POINTS)
    steps = ", ".join(str(p.step) for p in points)
    losses = ", ".join(f"{p.loss:.4f}" for p in points)
    chart = (
        "```mermaid\nxychart-beta\n"
        '    title "Training loss"\n'
        f'    x-axis "optimizer step" [{steps}]\n'
        '    y-axis "loss"\n'
        f"    line [{losses}]\n```"
    )
    rows = [
        (p.step, _number(p.loss), _number(p.learning_rate), _number(p.grad_norm)) for p in thin(points, 12)
    ]
    text = f"## Losses\n\n{chart}\n\n" + table(("step", "loss", "learning rate", "gradient norm"), rows)
    if report.evaluations:
        text += "\n\nHeld-out rows:\n\n" + table(
            ("step", "loss"), [(p.step, _number(p.loss)) for p in report.evaluations]
        )
    return text


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` of `points`, evenly spread, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _memory(report: TrainReport) -> str:
    """Show each rank's peak memory, and the prediction where there is one."""
    predicted = report.plan.memory if report.plan is not None and report.plan.device == "cuda" else None
    rows = [
        (
            m.rank,
            _gib(m.host_peak_bytes),
            _gib(m.device_peak_allocated_bytes),
            _gib(m.device_peak_reserved_bytes),
            _against(predicted.allocated_bytes, m.device_peak_allocated_bytes) if predicted else None,
        )
        for m in report.memory
    ]
    head = ("rank", "host peak", "GPU peak, allocated", "GPU peak, reserved", "predicted, allocated")
    text = "## Memory\n\n" + table(head, rows)
    if predicted is None:
        return text
    low, high = _gib(predicted.low_bytes), _gib(predicted.high_bytes)
    return (
        f"{text}\n\nThe prediction is for rows of full length that are trained on whole, an upper bound for "
        f"shorter ones; likely {low} to {high} ({predicted.confidence} confidence)."
    )


def _against(predicted: int, measured: int | None) -> str:
    """Show a prediction, and how far it is from what was measured."""
    off = f" ({predicted / measured - 1:+.0%})" if measured else ""
    return f"{_gib(predicted)}{off}"


def _where(report: TrainReport) -> str:
    """Say where everything is."""
    rows: list[tuple[str, object]] = [("run directory", f"`{report.run_dir}`")]
    if report.model:
        size = report.saved.get("bytes", 0) / 2**20
        tensors = report.saved.get("tensors")
        rows.append(("model", f"`{report.model}` ({tensors} tensors, {size:.1f} MiB, read back from disk)"))
    if report.attempts:
        logs = f"`{report.run_dir}/attempt-{report.attempts}/logs/`"
        rows.append(("logs of every rank", logs))
    rows.append(("this report as JSON", f"`{report.run_dir}/report.json`"))
    return "## Where things are\n\n" + table(("what", "where"), rows)


def _number(value: float | None) -> str:
    """Format a metric; None is a value that was not finite or not measured."""
    return "–" if value is None else f"{value:.4g}"


def _gib(value: int | None) -> str | None:
    """Format bytes as GiB."""
    return None if value is None else f"{value / 2**30:.2f} GiB"
