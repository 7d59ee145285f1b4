"""The page `soup-train-plan`, and the same for a terminal: what was chosen, from what, with what memory."""

from __future__ import annotations

from collections.abc import Sequence

from soup_flows.pages import table
from soup_flows.sharding import Candidate, ShardingPlan
from soup_flows.sharding.fit import Fit, FitPoint
from soup_flows.sharding.words import plan_rows, plan_text

GIB = 1 << 30
TERMINAL_ROWS = 8
"""Candidates that a terminal shows; the page has all."""


def plan_page(plan: ShardingPlan) -> str:
    """Return the page: the plan with its reasons, memory by component, and every candidate with its why-not."""
    head = f"# Plan: {plan.strategy} on {plan.world_size} rank(s)\n\n{_sentence(plan.reason)}"
    parts = [head, table(("", "value", "why"), plan_rows(plan))]
    if plan.memory is not None:
        parts.append(_memory(plan))
    if plan.candidates:
        count = sum(c.fits for c in plan.candidates)
        parts.append(
            f"## Candidates\n\n{count} of {len(plan.candidates)} fit. `cost` is the expected time of an optimizer "
            "step against the chosen one, from a closed form that is good for the order, not for a timetable.\n\n"
            + table(_HEAD, [_row(c) for c in plan.candidates])
        )
    if plan.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in plan.notes))
    return "\n\n".join(parts) + "\n"


def plan_terminal(plan: ShardingPlan) -> str:
    """Return the plan for a terminal: values with reasons, memory, the nearest candidates."""
    lines = [plan_text(plan)]
    if plan.memory is not None and plan.room is not None:
        parts = ", ".join(f"{name.replace('_', ' ')} {_gib(size)}" for name, size in _parts(plan.memory.step))
        low, high = _gib(plan.memory.low_bytes), _gib(plan.memory.high_bytes)
        lines += ["", f"peak, likely {low} to {high}: {parts}"]
    if plan.candidates:
        rows = [[str(cell) for cell in _row(c)] for c in plan.candidates[:TERMINAL_ROWS]]
        lines += ["", *_columns([list(_HEAD), *rows])]
        if (more := len(plan.candidates) - len(rows)) > 0:
            lines.append(f"and {more} more, with --json")
    return "\n".join(lines)


def fit_text(answer: Fit) -> str:
    """Return what fits for a terminal."""

    def line(name: str, point: FitPoint | None, value: int | None) -> str:
        if point is None:
            return f"{name:<22} nothing fits"
        on = " with gradient checkpointing" if point.gradient_checkpointing else ""
        return (
            f"{name:<22} {value}   ({point.strategy}{on} on {point.gpus} GPU(s), micro batch "
            f"{point.per_device_train_batch_size}, rows of {point.max_length} tokens: "
            f"{_gib(point.required_bytes)} each)"
        )

    longest, micro, fewest = answer.max_length, answer.per_device_train_batch_size, answer.gpus
    return "\n".join(
        (
            line("longest rows (tokens)", longest, longest.max_length if longest else None),
            line("largest micro batch", micro, micro.per_device_train_batch_size if micro else None),
            line("fewest GPUs", fewest, fewest.gpus if fewest else None),
        )
    )


_HEAD = ("strategy", "batch", "checkpointing", "peak", "needs free", "host", "cost", "why not")


def _row(c: Candidate) -> tuple[str, ...]:
    """Return a candidate as a row."""
    name = (
        f"{c.strategy} ({c.world_size} rank)" if c.strategy == "single" and c.world_size == 1 else c.strategy
    )
    return (
        f"> {name}" if c.chosen else name,
        c.passes,
        "yes" if c.gradient_checkpointing else "no",
        _gib(c.allocated_bytes),
        _gib(c.required_bytes),
        _gib(c.host_bytes) if c.host_bytes else "-",
        f"{c.relative_cost:.2f}",
        c.why_not or "chosen",
    )


def _memory(plan: ShardingPlan) -> str:
    """Show the prediction by component."""
    memory, room = plan.memory, plan.room
    assert memory is not None
    names = dict.fromkeys([*memory.load, *memory.step])
    rows = [
        (name.replace("_", " "), _gib(memory.load.get(name, 0)), _gib(memory.step.get(name, 0)))
        for name in names
        if memory.load.get(name) or memory.step.get(name)
    ]
    rows.append(("**together**", _gib(memory.load_bytes), _gib(memory.allocated_bytes)))
    free = f", of {_gib(room.device)} free" if room is not None else ""
    host = memory.host
    away = f" On the host: up to {_gib(host.load)} while loading, {_gib(host.step)} while training" + (
        f", {_gib(host.nvme)} on NVMe." if host.nvme else "."
    )
    return (
        f"## Memory of one rank\n\nPeak {_gib(memory.allocated_bytes)} allocated, likely {_gib(memory.low_bytes)} to "
        f"{_gib(memory.high_bytes)}, in the phase `{memory.peak_phase}`; with margin it needs "
        f"{_gib(plan.candidates[0].required_bytes)}{free}. Confidence: {memory.confidence} "
        f"({'; '.join(memory.reasons)}).{away}\n\n" + table(("component", "loading", "step"), rows)
    )


def _parts(sizes: dict[str, int]) -> list[tuple[str, int]]:
    """Return the components that matter, largest first."""
    return sorted(((n, s) for n, s in sizes.items() if s >= 0.05 * GIB), key=lambda item: -item[1])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns; the last one is ragged."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[-1]]).rstrip() for r in rows]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _gib(size: int) -> str:
    """Return bytes as GiB."""
    return f"{size / GIB:.2f} GiB"
