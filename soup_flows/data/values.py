"""The values that travel through data preparation: rows, dropped rows, examples, encoded rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
"""`role` and `content` (text), and where the row has them `weight` (0 or 1), `tool_calls`, `name`, ..."""

Kind = Literal["chat", "completion", "text", "tokens", "preference", "kto"]

FOUND_LIMIT = 80
"""Characters of a wrong value that a report quotes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it stands in a file.

    Attributes:
        line: line of the file, counted from 1; the row's number for JSON arrays, Parquet and Arrow.
        value: column names to values.
        file: path of the file.
    """

    line: int
    value: dict[str, Any]
    file: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """One row that is not trained, and why.

    Attributes:
        line: as in `Row`.
        reason: short and the same for all rows with this fault, so that rows can be counted by it.
        field: where in the row, such as `messages[1].content`; empty when the whole row is meant.
        found: what stands there, cut to 80 characters.
        wanted: what should stand there.
        file: path of the file.
    """

    line: int
    reason: str
    field: str = ""
    found: str = ""
    wanted: str = ""
    file: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else f"row {self.line}"
        parts = [f"{place}: {self.reason}"]
        parts += [f"in {self.field}"] if self.field else []
        parts += [f"found {self.found}"] if self.found else []
        parts += [f"wanted {self.wanted}"] if self.wanted else []
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON output."""
        names = ("line", "reason", "field", "found", "wanted", "file")
        return {name: getattr(self, name) for name in names}


EXAMPLES_A_REASON = 100
"""Dropped rows of one reason that are kept as examples; all are counted."""


class Drops:
    """Rows that are not trained: all are counted, the first of each reason are kept.

    Attributes:
        counts: rows by reason.
        examples: the first `EXAMPLES_A_REASON` rows of each reason, in the order they came.
    """

    def __init__(self, items: Iterable[Dropped] = (), counts: Mapping[str, int] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: list[Dropped] = []
        for item in items:
            self.add(item)
        if counts is not None:
            self.counts = Counter(counts)

    def add(self, item: Dropped) -> None:
        """Count a row."""
        self.counts[item.reason] += 1
        if self.counts[item.reason] <= EXAMPLES_A_REASON:
            self.examples.append(item)

    @property
    def total(self) -> int:
        """Rows that were dropped."""
        return self.counts.total()


@dataclass(frozen=True, slots=True)
class Example:
    """One row in the one shape all later steps read.

    Attributes:
        kind: which of the following attributes are set.
        messages: `chat`: the conversation. `preference` and `kto` with messages: the shared prompt.
        prompt: `completion`, and `preference` and `kto` with text: the text before the answer.
        completion: `completion` and `kto`: the answer (`kto`: text or messages).
        text: `text`: a document.
        input_ids: `tokens`: token ids of the whole row.
        labels: `tokens`: labels where the row has them, -100 for what is not trained.
        chosen: `preference`: the better answer, text or messages.
        rejected: `preference`: the worse answer, of the same type as `chosen`.
        label: `kto`: whether the answer is a good one.
        tools: tool schemas for the chat template.
        notes: what is odd about the row though it is kept, such as control tokens in its text.
        format: one of `formats.FORMATS`.
        line: as in `Row`.
        file: path of the file.
    """

    kind: Kind
    messages: list[Message] = field(default_factory=list)
    prompt: str = ""
    completion: str | list[Message] = ""
    text: str = ""
    input_ids: list[int] = field(default_factory=list)
    labels: list[int] | None = None
    chosen: str | list[Message] = ""
    rejected: str | list[Message] = ""
    label: bool = True
    tools: list[Any] | None = None
    notes: tuple[str, ...] = ()
    format: str = ""
    line: int = 0
    file: str = ""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row as token ids.

    Attributes:
        input_ids: token ids, at most `max_length` of them.
        labels: as long as `input_ids`: the id itself where it is trained, -100 elsewhere (not shifted).
        full_length: tokens before truncation.
        stop_trained: whether a token that ends the answer is among the trained ones.
        line: as in `Row`.
        file: path of the file.
        notes: what was odd about the tokens and has been put right.
    """

    input_ids: list[int]
    labels: list[int]
    full_length: int
    stop_trained: bool
    line: int = 0
    file: str = ""
    notes: tuple[str, ...] = ()


def writable(text: str) -> str:
    """Return text that can be written as UTF-8; what cannot (parts of odd file names) becomes an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def shown(value: object) -> str:
    """Return `value` as a report quotes it: its JSON type where that is the fault, cut to 80 characters."""
    if value is None:
        return "null"
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, (bool, int, float)):
        text = f"{value!r} ({type(value).__name__})"
    else:
        text = f"{type(value).__name__} {value!r}"
    text = writable(text)
    return text if len(text) <= FOUND_LIMIT else text[: FOUND_LIMIT - 1] + "…"
