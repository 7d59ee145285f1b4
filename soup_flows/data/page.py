"""The data report as a page: the body of the `soup-train-data` artifact, and what the command prints."""

from __future__ import annotations

from collections.abc import Sequence

from soup_flows.charts import CHART
from soup_flows.data.report import DataReport

_EXAMPLES = 3


def markdown(report: DataReport) -> str:
    """Return the report as Markdown: a summary, drops by reason, lengths as Mermaid and as a table, a row."""
    parts = [f"# Data: {report.rows_kept:,} of {report.rows_read:,} rows are trained", _summary(report)]
    if report.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in report.notes))
    if report.dropped:
        parts.append(_drops(report))
    parts += [_lengths(report), _sample(report)]
    return "\n\n".join(parts) + "\n"


def _summary(report: DataReport) -> str:
    rows: list[tuple[str, str]] = [
        ("source", _cell(report.source)),
        ("format", report.format),
        ("rows read", f"{report.rows_read:,}"),
        ("rows kept", f"{report.rows_kept:,}"),
        ("rows dropped", f"{report.rows_dropped:,}"),
        ("duplicates", f"{report.duplicates:,}"),
        (f"longest row ({report.length_unit})", f"{report.longest:,}"),
    ]
    if report.total_tokens is not None and report.trained_tokens is not None:
        share = report.trained_tokens / report.total_tokens if report.total_tokens else 0
        rows += [
            ("tokens an epoch", f"{report.total_tokens:,}"),
            ("trained tokens an epoch", f"{report.trained_tokens:,} ({share:.0%})"),
            ("rows that train an end token", f"{report.stop_trained_rows:,}"),
            ("maximum length (tokens)", f"{report.max_length:,}" if report.max_length else "none"),
            ("rows cut", f"{report.truncated_rows:,} ({report.truncated_share or 0:.1%})"),
            ("padding, batches of 8", f"{report.padding_share or 0:.1%}"),
            ("padding, packed", f"{report.packed_padding_share or 0:.1%}"),
        ]
    return _table(("", ""), rows)


def _drops(report: DataReport) -> str:
    rows = []
    for reason, total in report.reasons.items():
        items = [item for item in report.dropped if item["reason"] == reason]
        for index, item in enumerate(items[:_EXAMPLES]):
            count = f"{total:,}" if index == 0 else ""
            place = f"{item['file'].rsplit('/', 1)[-1]}:{item['line']}"
            name = reason if index == 0 else ""
            rows.append(
                (count, _cell(name), _cell(place), *(_cell(item[k]) for k in ("field", "found", "wanted")))
            )
    head = ("rows", "reason", "line", "field", "found", "wanted")
    return "## Dropped rows\n\n" + _table(head, rows)


def _lengths(report: DataReport) -> str:
    names = ", ".join(f'"{item.up_to}"' for item in report.lengths)
    counts = ", ".join(str(item.rows) for item in report.lengths)
    top = max((item.rows for item in report.lengths), default=1)
    chart = (
        f"{CHART}"
        f'    title "Rows by length in {report.length_unit}"\n'
        f"    x-axis [{names}]\n"
        f'    y-axis "rows" 0 --> {top}\n'
        f"    bar [{counts}]\n```"
    )
    rows = [(f"{item.up_to:,}", f"{item.rows:,}") for item in report.lengths]
    return f"## Lengths\n\n{chart}\n\n" + _table((f"up to ({report.length_unit})", "rows"), rows)


def _sample(report: DataReport) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in _runs(report.sample)), default=0))
    head = "## The first kept row\n\nWhat is trained stands between ⟦ and ⟧."
    return f"{head}\n\n{fence}\n{report.sample}\n{fence}"


def _runs(text: str) -> list[str]:
    """Return the runs of backticks in `text`, which the fence around it must be longer than."""
    runs, run = [], ""
    for sign in text + " ":
        if sign == "`":
            run += sign
        elif run:
            runs.append(run)
            run = ""
    return runs


def _cell(text: str) -> str:
    """Return text that cannot break a Markdown table or be read as HTML or a link."""
    safe = text.replace("\n", " ").replace("\\", "\\\\").replace("|", "\\|").replace("`", "\\`")
    return safe.replace("<", "&lt;").replace(">", "&gt;").replace("[", "\\[").replace("]", "\\]")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])
