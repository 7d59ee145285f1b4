"""The page `soup-train-plan`, and the same for a terminal: what was chosen, from what, with what memory."""

from __future__ import annotations

from collections.abc import Sequence

from soup_flows.markdown import table
from soup_flows.sharding import Candidate, ShardingPlan
from soup_flows.sharding.fit import Fit, FitPoint
from soup_flows.sharding.words import plan_rows, plan_text
from soup_flows.units import gib, ranks

TERMINAL_ROWS = 8
"""Candidates that a terminal shows; the page has all."""


def plan_page(plan: ShardingPlan) -> str:
    """Return the page: the plan with its reasons, memory by component, and every candidate with its why-not."""
    head = f"# Plan: {plan.strategy} on {ranks(plan.world_size)}\n\n{_sentence(plan.reason)}"
    parts = [head, table(("", "value", "why"), plan_rows(plan))]
    if plan.memory is not None:
        parts.append(_memory(plan))
    if plan.candidates:
        count = sum(c.fits for c in plan.candidates)
        parts.append(
            f"## Candidates\n\n{count} of {len(plan.candidates)} fit. `cost` is the expected time of an optimizer "
            "step against the chosen one, from a closed form that is good for the order, not for a timetable.\n\n"
            + _candidates(plan.candidates)
        )
    if plan.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in plan.notes))
    return "\n\n".join(parts) + "\n"


def plan_terminal(plan: ShardingPlan) -> str:
    """Return the plan for a terminal: values with reasons, memory, the nearest candidates."""
    lines = [plan_text(plan)]
    if plan.memory is not None and plan.room is not None:
        parts = ", ".join(
            f"{name.replace('_', ' ')} {gib(size, 2)}" for name, size in _parts(plan.memory.step)
        )
        low, high = gib(plan.memory.low_bytes, 2), gib(plan.memory.high_bytes, 2)
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
            f"{gib(point.required_bytes, 2)} each)"
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
        gib(c.allocated_bytes, 2),
        gib(c.required_bytes, 2),
        gib(c.host_bytes, 2) if c.host_bytes else "-",
        f"{c.relative_cost:.2f}",
        c.why_not or "chosen",
    )


def _candidates(candidates: Sequence[Candidate]) -> str:
    """Return the table for a page: narrow, so that the reasons have room."""
    rows = [_HEAD, *(_row(c) for c in candidates)]
    if not any(c.host_bytes for c in candidates):
        host = _HEAD.index("host")
        rows = [(*row[:host], *row[host + 1 :]) for row in rows]
    head, *cells = [[cell.replace(" GiB", "\u00a0GiB") for cell in row] for row in rows]
    return table(head, cells)


def _memory(plan: ShardingPlan) -> str:
    """Show the prediction by component."""
    memory, room = plan.memory, plan.room
    assert memory is not None
    both = (memory.load, memory.step)
    names = dict.fromkeys([*memory.load, *memory.step])
    rows = [
        (name.replace("_", " "), *(gib(size, 2) if (size := part.get(name)) else None for part in both))
        for name in names
        if memory.load.get(name) or memory.step.get(name)
    ]
    rows.append(("**together**", gib(memory.load_bytes, 2), gib(memory.allocated_bytes, 2)))
    free = f", of {gib(room.device, 2)} free" if room is not None else ""
    host = memory.host
    away = f" On the host: up to {gib(host.load, 2)} while loading, {gib(host.step, 2)} while training" + (
        f", {gib(host.nvme, 2)} on NVMe." if host.nvme else "."
    )
    return (
        f"## Memory of one rank\n\nPeak {gib(memory.allocated_bytes, 2)} allocated, likely "
        f"{gib(memory.low_bytes, 2)} to {gib(memory.high_bytes, 2)}, "
        f"in the phase `{memory.peak_phase}`; with margin it needs "
        f"{gib(plan.candidates[0].required_bytes, 2)}{free}. Confidence: {memory.confidence} "
        f"({'; '.join(memory.reasons)}).{away}\n\n" + table(("component", "loading", "step"), rows)
    )


def _parts(sizes: dict[str, int]) -> list[tuple[str, int]]:
    """Return the components that are at least a twentieth of the whole, largest first."""
    least = sum(sizes.values()) / 20
    return sorted(((n, s) for n, s in sizes.items() if s >= least), key=lambda item: -item[1])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns; the last one is ragged."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[-1]]).rstrip() for r in rows]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
