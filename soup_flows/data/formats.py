"""Which format a data set has, and its rows as `Example`s; rows that cannot teach are named."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from soup_flows.data.messages import BadRow
from soup_flows.data.normalise import CONVERTERS
from soup_flows.data.reading import read_rows
from soup_flows.data.values import Dropped, Drops, Example, Row, shown
from soup_flows.errors import Problem, Refused, nearest, refuse

Policy = Literal["drop", "refuse"]

FORMATS: dict[str, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "kto": ("prompt", "completion", "label"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "conversation": ("conversation",),
    "alpaca": ("instruction",),
    "pre-tokenised": ("input_ids",),
    "prompt-completion": ("prompt", "completion"),
    "prompt-response": ("prompt", "response"),
    "question-answer": ("question", "answer"),
    "text": ("text",),
}
"""Formats and the columns that mark them, in the order they are looked for."""

_LONELY = {"chosen": "preference", "rejected": "preference", "prompt": "prompt-completion"}
_SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class DataSet:
    """The rows of a data set that can be trained, and those that cannot.

    Attributes:
        examples: the kept rows, in the order of the files.
        rows_read: rows seen, blank lines not counted.
        rows_kept: `len(examples)`.
        dropped: one entry per row that was not kept.
        format: one of `FORMATS`.
    """

    examples: list[Example]
    rows_read: int
    rows_kept: int
    dropped: list[Dropped]
    format: str


def load_examples(
    source: str | Path, *, policy: Policy = "drop", field: str = "dataset", limit: int | None = None
) -> DataSet:
    """Read a whole data set.

    Args:
        source: as in `read_rows`.
        policy: `drop` leaves rows with faults out and lists them, `refuse` raises if there is one.
        field: the setting that named `source`, for messages.
        limit: stop after this many rows.

    Raises:
        Refused: if the source is unreadable, mixes formats, has no row, or no row is kept; under `refuse`
            also for each faulty row (the first 20 are spelled out).
    """
    examples: list[Example] = []
    dropped: list[Dropped] = []
    for item in itertools.islice(iter_examples(source, field=field), limit):
        if isinstance(item, Dropped):
            dropped.append(item)
        else:
            examples.append(item)
    check_kept(source, len(examples), Drops(dropped), policy=policy, field=field)
    return DataSet(examples, len(examples) + len(dropped), len(examples), dropped, examples[0].format)


def iter_examples(source: str | Path, *, field: str = "dataset") -> Iterator[Example | Dropped]:
    """Yield each row as `Example` or `Dropped`; one row is in memory at a time.

    Raises:
        Refused: if the source is unreadable or mixes formats; the rest of the source is then read to count
            the rows of each format.
    """
    current = ""
    first = 0
    rows = read_rows(source, field=field)
    for row in rows:
        if isinstance(row, Dropped):
            yield row
            continue
        found = detect(row.value, current)
        if not found:
            yield _unknown(row)
            continue
        if current and found != current:
            raise _mixture(current, first, found, row, rows, field)
        if not current:
            current, first = found, row.line
        yield convert(row, found)


def detect(value: dict[str, Any], current: str = "") -> str:
    """Return the format of one row, or an empty string.

    Columns with a value decide; a row without any is known by its column names. A row that has the columns of
    `current`, the format of the rows before, keeps it.
    """
    if current and FORMATS[current][0] in value and all(key in value for key in FORMATS[current]):
        return current
    filled = {key for key, item in value.items() if item is not None}
    for keys in (filled, set(value)):
        for name, wanted in FORMATS.items():
            if keys.issuperset(wanted):
                return name
    return next((_LONELY[key] for key in _LONELY if key in value), "")


def convert(row: Row, name: str) -> Example | Dropped:
    """Return the row as an `Example`, or as `Dropped` with the field, what was found and what was wanted."""
    try:
        return CONVERTERS[name](row, name)
    except BadRow as error:
        return Dropped(row.line, error.reason, error.field, error.found, error.wanted, row.file)


def check_kept(
    source: str | Path, kept: int, drops: Drops, *, policy: Policy = "drop", field: str = "dataset"
) -> None:
    """Raise `Refused` if nothing is left to train, or under the policy `refuse` if a row was dropped."""
    dropped = drops.examples
    if not kept and not dropped:
        raise refuse("DATA010", field, f"{source} has 0 rows", "give a file with at least one row")
    if not kept:
        reasons = drops.counts.most_common()
        words = "; ".join(f"{count} x {reason}" for reason, count in reasons)
        message = f"none of the {drops.total} rows of {source} can be trained: {words}. First: {dropped[0]}"
        long = "truncation" in reasons[0][0]
        fix = (
            "raise the maximum length or shorten the prompts"
            if long
            else "mend the rows, or give another file"
        )
        raise refuse("DATA011", field, message, fix)
    if policy == "refuse" and dropped:
        head = [
            Problem(
                id="DATA012", severity="error", field=field, message=str(item), fix="mend or remove the row"
            )
            for item in dropped[:_SHOWN_PROBLEMS]
        ]
        if drops.total > len(head):
            more = f"and {drops.total - len(head)} more rows with faults"
            head.append(Problem(id="DATA012", severity="error", field=field, message=more))
        raise Refused(head)


def _unknown(row: Row) -> Dropped:
    keys = [str(key) for key in row.value]
    known = sorted({key for wanted in FORMATS.values() for key in wanted})
    near = next((hint for hint in (nearest(key, known) for key in keys) if hint), "")
    wanted = f"columns of one format ({', '.join(known)})" + (f"; {near}" if near else "")
    inside = next(
        (k for k, v in row.value.items() if isinstance(v, list) and v and isinstance(v[0], dict)), None
    )
    if inside is not None:
        wanted += f"; the rows seem to be in {shown(inside)}: write that list alone into the file"
    found = ", ".join(keys)[:80] or "no columns"
    return Dropped(row.line, "no known columns", "", found, wanted, row.file)


def _mixture(
    current: str, first: int, found: str, row: Row, rest: Iterator[Row | Dropped], field: str
) -> Refused:
    """Read on to count, then name both formats and the first rows of the second."""
    others = [row.line]
    count = 1
    for later in rest:
        if isinstance(later, Row) and detect(later.value, current) not in ("", current):
            count += 1
            others += [later.line] if len(others) < 10 else []
    numbers = ", ".join(map(str, others)) + (", ..." if count > len(others) else "")
    message = (
        f"{row.file} mixes formats: row {first} is {current}, but row {numbers} is {found} "
        f"({count} {'row' if count == 1 else 'rows'} not {current})"
    )
    return refuse("DATA013", field, message, "put each format into a file of its own, or convert the rows")
