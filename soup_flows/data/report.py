"""What a data set will do to a run: rows, drops, tokens, lengths, padding, one row in full."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from soup_flows.data.formats import Policy, check_kept, iter_examples
from soup_flows.data.lengths import Bin, histogram, packed_padding_share, padded_share
from soup_flows.data.masking import IGNORED, TrainOn, encode
from soup_flows.data.messages import CONTROL_NOTE
from soup_flows.data.values import Dropped, Drops, Encoded, Example, writable

SAMPLE_TOKENS = 400
"""Tokens of the row that is shown in full."""

_NAMED_LINES = 20


class DataReport(BaseModel):
    """The `soup-train-data` artifact as a value. Without a tokenizer, what needs tokens is None.

    Attributes:
        source: what was read.
        format: one of `formats.FORMATS`.
        rows_read: rows seen, blank lines not counted.
        rows_kept: rows that are trained.
        rows_dropped: every other row.
        dropped: the first 100 of them for each reason: line, reason, field, found, wanted, file.
        reasons: rows dropped by reason, the most frequent first.
        max_length: rows are cut to this many tokens.
        trained_tokens: tokens the loss counts in one epoch.
        total_tokens: tokens of the kept rows after truncation, one epoch.
        length_unit: what `lengths` counts: tokens, or characters without a tokenizer.
        lengths: rows by length before truncation: the longest length of each bin, and rows in it.
        longest: length of the longest row before truncation, in `length_unit`.
        truncated_rows: rows that were cut.
        truncated_share: their share of the kept rows, 0 to 1.
        padding_share: share of padding in batches of 8 rows in file order, 0 to 1.
        packed_padding_share: share of padding when rows are packed best-fit into `max_length`, 0 to 1.
        duplicates: rows that equal an earlier row.
        duplicate_lines: the lines of the first 20 of them.
        stop_trained_rows: rows in which a token that ends the answer is trained.
        notes: what is odd though no row was dropped for it.
        sample: one row as text, trained parts between ⟦ and ⟧.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    format: str
    rows_read: int
    rows_kept: int
    rows_dropped: int
    dropped: tuple[dict[str, Any], ...]
    reasons: dict[str, int]
    max_length: int | None
    trained_tokens: int | None
    total_tokens: int | None
    length_unit: Literal["tokens", "characters"]
    lengths: tuple[Bin, ...]
    longest: int
    truncated_rows: int | None
    truncated_share: float | None
    padding_share: float | None
    packed_padding_share: float | None
    duplicates: int
    duplicate_lines: tuple[int, ...]
    stop_trained_rows: int | None
    notes: tuple[str, ...]
    sample: str

    @property
    def drops(self) -> Drops:
        """The dropped rows, as they were counted."""
        return Drops((Dropped(**row) for row in self.dropped), self.reasons)


def report_on(
    source: str | Path,
    tokenizer: Any = None,
    *,
    max_length: int | None = None,
    train_on: TrainOn = "assistant",
    policy: Policy = "drop",
    field: str = "dataset",
) -> DataReport:
    """Report on a data set without keeping its rows; without a tokenizer, lengths are in characters.

    Raises:
        Refused: as `iter_examples` and `encode`; also when no row is left to train.
    """
    tally = Tally(source, tokenizer, max_length)
    for example in iter_examples(source, field=field):
        if isinstance(example, Dropped):
            tally.drop(example)
            continue
        encoded = None
        if tokenizer is not None:
            encoded = encode(better_answer(example), tokenizer, max_length or 2**62, train_on)
        if isinstance(encoded, Dropped):
            tally.drop(encoded)
            continue
        tally.keep(example, encoded)
    check_kept(source, len(tally.lengths), tally.drops, policy=policy, field=field)
    return tally.report()


def better_answer(example: Example) -> Example:
    """Return a preference pair as the row with the better answer, to be measured; other rows as they are."""
    if example.kind not in ("preference", "kto"):
        return example
    answer = example.chosen if example.kind == "preference" else example.completion
    if isinstance(answer, list):
        return replace(example, kind="chat", messages=example.messages + answer)
    return replace(example, kind="completion", completion=answer)


@dataclass(frozen=True, slots=True)
class Kept:
    """What the report counts of a kept row; small, so that it can come from another process.

    Attributes:
        key: eight bytes that differ for rows that teach something else.
        line: as in `Row`.
        format: one of `formats.FORMATS`.
        notes: as in `Example`.
        full_length: tokens before truncation, or characters.
        length: tokens after truncation.
        trained: tokens the loss counts.
        stop_trained: whether a token that ends the answer is among them.
    """

    key: bytes
    line: int
    format: str
    notes: tuple[str, ...]
    full_length: int
    length: int = 0
    trained: int = 0
    stop_trained: bool = False


def kept_row(example: Example, encoded: Encoded | None) -> Kept:
    """Return what the report counts of a row; `encoded` is None without a tokenizer."""
    key, line, name, notes = _content_hash(example), example.line, example.format, example.notes
    if encoded is None:
        return Kept(key, line, name, notes, characters(example))
    notes += encoded.notes
    trained = sum(label != IGNORED for label in encoded.labels[1:])
    length = len(encoded.input_ids)
    return Kept(key, line, name, notes, encoded.full_length, length, trained, encoded.stop_trained)


class Tally:
    """Counts rows as they pass; its memory is about a hundred bytes a kept row.

    Attributes:
        drops: the rows that were not kept.
        lengths: tokens of each kept row before truncation, or characters.
        sample: the first kept row as text, trained parts marked; empty until there is one.
    """

    def __init__(self, source: str | Path, tokenizer: Any = None, max_length: int | None = None) -> None:
        self.drops = Drops()
        self.lengths = array("Q")
        self.sample = ""
        self._source, self._tokenizer, self._max_length = writable(str(source)), tokenizer, max_length
        self._seen: set[bytes] = set()
        self._duplicates = self._trained = self._stopping = self._truncated = 0
        self._duplicate_lines: list[int] = []
        self._notes: dict[str, tuple[int, list[int]]] = {}
        self._format = ""

    def drop(self, item: Dropped) -> None:
        """Count a row that is not kept."""
        self.drops.add(item)

    def keep(self, example: Example, encoded: Encoded | None) -> None:
        """Count a kept row and remember the first as the sample; `encoded` is None without a tokenizer."""
        self.count(kept_row(example, encoded))
        if not self.sample:
            self.sample = _plain_sample(example) if encoded is None else marked_text(encoded, self._tokenizer)

    def count(self, row: Kept) -> None:
        """Count a kept row."""
        self._format = row.format
        if row.key in self._seen:
            self._duplicates += 1
            if len(self._duplicate_lines) < _NAMED_LINES:
                self._duplicate_lines.append(row.line)
        self._seen.add(row.key)
        for note in row.notes:
            count, lines = self._notes.get(note, (0, []))
            self._notes[note] = (count + 1, lines if count >= _NAMED_LINES else [*lines, row.line])
        self.lengths.append(row.full_length)
        if self._tokenizer is not None:
            self._trained += row.trained
            self._stopping += row.stop_trained
            self._truncated += row.full_length > row.length

    def report(self) -> DataReport:
        """Return the report on all rows counted so far."""
        counted = self._tokenizer is not None
        limit = self._max_length or max(self.lengths, default=0)
        cut = array("Q", (min(length, limit) for length in self.lengths))
        kept = len(self.lengths)
        return DataReport(
            source=self._source,
            format=self._format,
            rows_read=kept + self.drops.total,
            rows_kept=kept,
            rows_dropped=self.drops.total,
            dropped=tuple(item.as_dict() for item in self.drops.examples),
            reasons=dict(self.drops.counts.most_common()),
            max_length=self._max_length,
            trained_tokens=self._trained if counted else None,
            total_tokens=sum(cut) if counted else None,
            length_unit="tokens" if counted else "characters",
            lengths=histogram(self.lengths),
            longest=max(self.lengths, default=0),
            truncated_rows=self._truncated if counted else None,
            truncated_share=self._truncated / kept if counted and kept else None,
            padding_share=padded_share(cut) if counted else None,
            packed_padding_share=packed_padding_share(cut, limit) if counted else None,
            duplicates=self._duplicates,
            duplicate_lines=tuple(self._duplicate_lines),
            stop_trained_rows=self._stopping if counted else None,
            notes=tuple(self._remarks(counted, kept)),
            sample=self.sample,
        )

    def _remarks(self, counted: bool, kept: int) -> Iterator[str]:
        for note, (count, lines) in self._notes.items():
            plain = "; it is encoded as plain text" if counted and note.startswith(CONTROL_NOTE) else ""
            named = ", ".join(map(str, lines)) + (", ..." if count > len(lines) else "")
            yield f"{note}{plain} ({count} {'row' if count == 1 else 'rows'}: line {named})"
        if counted and kept and not self._stopping:
            yield "no row trains a token that ends the answer: the model will not learn to stop"
        if self._duplicates:
            first = ", ".join(map(str, self._duplicate_lines))
            more = ", ..." if self._duplicates > len(self._duplicate_lines) else ""
            one = self._duplicates == 1
            equal = "row equals" if one else "rows equal"
            yield f"{self._duplicates} {equal} an earlier row (line {first}{more})"
        if kept == 1:
            yield "1 row: every step trains the same row"


def _content_hash(example: Example) -> bytes:
    """Return eight bytes that differ for rows that teach something else."""
    e = example
    value = (e.messages, e.prompt, e.completion, e.text, e.input_ids, e.labels, e.chosen, e.rejected, e.label)
    return hashlib.blake2b(json.dumps([value, e.tools], default=str).encode(), digest_size=8).digest()


def characters(example: Example) -> int:
    """Return the length of a row's text in characters; of token ids, their number."""
    if example.kind == "tokens":
        return len(example.input_ids)
    example = better_answer(example)
    texts = [message["content"] for message in example.messages]
    return sum(map(len, [*texts, example.prompt, str(example.completion), example.text]))


def marked_text(encoded: Encoded, tokenizer: Any) -> str:
    """Return the row as text, its first 400 tokens, trained parts between ⟦ and ⟧."""
    ids, labels = encoded.input_ids[:SAMPLE_TOKENS], encoded.labels[:SAMPLE_TOKENS]
    parts: list[str] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or (labels[end] == IGNORED) != (labels[start] == IGNORED):
            text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
            parts.append(text if labels[start] == IGNORED else f"⟦{text}⟧")
            start = end
    return "".join(parts) + (" …" if len(encoded.input_ids) > SAMPLE_TOKENS else "")


def _plain_sample(example: Example) -> str:
    example = better_answer(example)
    if example.kind == "chat":
        return "\n".join(f"{m['role']}: {m['content']}" for m in example.messages)[:2000]
    if example.kind == "completion":
        return f"{example.prompt}⟦{example.completion}⟧"[:2000]
    return example.text[:2000]
