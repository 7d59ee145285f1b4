"""Markdown pages of a run, for Prefect's page, the terminal and the run directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from soup_flows.attempts_page import attempts_table
from soup_flows.charts import curve, thin
from soup_flows.errors import Problem
from soup_flows.markdown import table
from soup_flows.proof import Proof
from soup_flows.report import Point, TrainReport
from soup_flows.sharding.words import plan_rows
from soup_flows.units import counted, gib, ranks

POINT_ROWS = 12
"""Rows of the table below a curve."""


def points_table(points: Sequence[Point]) -> str:
    """Return curves as a table, at most `POINT_ROWS` rows, for pages that do not draw Mermaid's charts.

    Args:
        points: what was logged, in the order of its steps; the first and the last are always shown.
    """
    rows = [
        (p.step, _number(p.loss), _number(p.learning_rate), _number(p.grad_norm))
        for p in thin(points, POINT_ROWS)
    ]
    return table(("step", "loss", "learning rate", "gradient norm"), rows)


def report_page(report: TrainReport) -> str:
    """Return the page `soup-train-report`: what ran, proof, losses, memory, where things are."""
    parts = [_head(report)]
    if report.problems:
        parts.append("## Findings before the launch\n\n" + problems_table(report.problems))
    if report.plan is not None:
        parts.append(_what_ran(report))
    if report.proof is not None:
        parts.append(_proof(report.proof))
    if report.ledger or report.resumed or report.checkpoints:
        parts.append(_recovery(report))
    if report.train:
        parts.append(_losses(report))
    if report.memory:
        parts.append(_memory(report))
    parts.append(_where(report))
    if report.last_lines:
        parts.append(_last_lines(report.last_lines))
    return "\n\n".join(parts) + "\n"


def _last_lines(logs: Mapping[str, Sequence[str]]) -> str:
    """Show the last lines of every log, indented, since a fence might be closed by a line of the log."""
    shown = (
        f"{name.replace('_', ' ')}:\n\n" + "\n".join(f"    {line}" for line in lines)
        for name, lines in logs.items()
    )
    return "## Last lines\n\n" + "\n\n".join(shown)


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
        if report.early_stop is not None:
            stop = report.early_stop
            lines.append(
                f"Stopped early, after {stop.waited} evaluations without an improvement on step {stop.best_step}; "
                f"{report.total_steps} steps were planned."
            )
        if report.best is not None:
            best = report.best
            lines.append(
                f"The model is that of step {best.step}, the lowest held-out loss ({_number(best.eval_loss)}; "
                f"step {best.last_step} had {_number(best.last_eval_loss)})."
            )
    return "\n\n".join(lines)


def problems_table(problems: Sequence[Problem]) -> str:
    """Return the findings as a table, in the order given; of few columns, since Prefect's page is narrow."""
    rows = [(f"{p.severity} {p.id}", f"`{p.field}`: {p.message}", p.fix) for p in problems]
    return table(("finding", "what would happen", "fix"), rows)


def validation_page(problems: Sequence[Problem], silenced: Mapping[str, str]) -> str:
    """Return the page `soup-train-validation`: every finding, errors first, and what was silenced."""
    counts = Counter(problem.severity for problem in problems)
    words = ", ".join(counted(counts[kind], kind) for kind in ("error", "warning", "note") if counts[kind])
    parts = [f"# Validation: {words or 'nothing found'}"]
    if problems:
        parts.append(problems_table(problems))
        parts.append(
            "`soup-flows explain RULE` tells why, with the evidence; `docs/rules.md` lists every rule."
        )
    if silenced:
        parts.append("Silenced for this run:\n\n" + table(("rule", "reason"), silenced.items()))
    return "\n\n".join(parts) + "\n"


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
        f"{ranks(proof.world_size)} formed the group; everything below was read from them after their first "
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
    losses = [(p.step, p.loss) for p in report.train if p.loss is not None]
    text = (
        "## Losses\n\n"
        + (f"{curve('Training loss', losses)}\n\n" if len(losses) > 1 else "")
        + points_table(report.train)
    )
    if report.evaluations:
        text += "\n\nHeld-out rows:\n\n" + table(
            ("step", "loss"), [(p.step, _number(p.loss)) for p in thin(report.evaluations, POINT_ROWS)]
        )
    return text


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


def _recovery(report: TrainReport) -> str:
    """Show the attempts, the proof of the resume, and what was saved."""
    text = "## Attempts and checkpoints\n\n" + attempts_table(report)
    resumed = report.resumed
    if resumed is not None:
        rows = [
            ("step", resumed.from_step, resumed.step),
            ("loss", _number(resumed.loss_before), _number(resumed.loss)),
            ("learning rate", _number(resumed.learning_rate_before), _number(resumed.learning_rate)),
        ]
        what = "The weights alone were taken from" if resumed.weights_only else "Resumed"
        text += f"\n\n{what} `{resumed.checkpoint}`:\n\n"
        text += table(("", "last before", "first after"), rows)
    saved = report.checkpoints[-1:]
    lines = [
        f"newest checkpoint: step {c.step}, {c.bytes / 2**20:.1f} MiB, saved in {c.seconds:.1f} s, `{c.path}`"
        for c in saved
    ]
    lines += [f"set aside: {line}" for line in report.set_aside]
    lines += [f"not saved: {line}" for line in report.save_failures]
    lines += [f"changed: {line}" for row in report.ledger[-1:] for line in row.change.path]
    return text + ("\n\n" + "\n".join(f"- {line}" for line in lines) if lines else "")


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
    rows += [(f"{m.what} in the checkpoint store", f"`{m.url}`, confirmed") for m in report.mirrored[-2:]]
    rows += [("**not** in the checkpoint store", failure) for failure in report.mirror_failures]
    rows.append(("this report as JSON", f"`{report.run_dir}/report.json`"))
    return "## Where things are\n\n" + table(("what", "where"), rows)


def _number(value: float | None) -> str:
    """Format a metric; None is a value that was not finite or not measured."""
    return "–" if value is None else f"{value:.4g}"


def _gib(value: int | None) -> str | None:
    """Format bytes as GiB."""
    return None if value is None else gib(value, 2)
