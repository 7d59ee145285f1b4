"""Arithmetic on row lengths: a histogram, and how much of a batch is padding with and without packing."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

BATCH_ROWS = 8
"""Rows of the batches for which padding is counted."""


class Bin(BaseModel):
    """One bar of a histogram: rows longer than the bin before and at most `up_to` long."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    up_to: int
    rows: int


def histogram(lengths: Iterable[int]) -> tuple[Bin, ...]:
    """Return rows per length, in bins that double: up to 16, 32, 64, ..., without empty ends."""
    counts: dict[int, int] = {}
    for length in lengths:
        power = max(4, (length - 1).bit_length())
        counts[power] = counts.get(power, 0) + 1
    if not counts:
        return ()
    powers = range(min(counts), max(counts) + 1)
    return tuple(Bin(up_to=2**power, rows=counts.get(power, 0)) for power in powers)


def padded_share(lengths: Sequence[int], batch_rows: int = BATCH_ROWS) -> float:
    """Return the share of padding when rows are batched in order and padded to the longest of the batch."""
    starts = range(0, len(lengths), batch_rows)
    batches = [lengths[start : start + batch_rows] for start in starts]
    slots = sum(max(batch) * len(batch) for batch in batches)
    return 1 - sum(lengths) / slots if slots else 0.0


def packed_padding_share(lengths: Sequence[int], capacity: int) -> float:
    """Return the share of padding when rows are packed best-fit, longest first, into `capacity` tokens."""
    packs = count_packs(lengths, capacity)
    return 1 - sum(lengths) / (packs * capacity) if packs and capacity else 0.0


def count_packs(lengths: Sequence[int], capacity: int) -> int:
    """Return how many packs of `capacity` tokens best-fit decreasing needs.

    Raises:
        ValueError: if a row is longer than `capacity`.
    """
    packs = 0
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        if length > capacity:
            raise ValueError(f"a row of {length} tokens does not fit into {capacity}")
        at = bisect.bisect_left(rooms, length)
        room = rooms.pop(at) if at < len(rooms) else capacity
        packs += room == capacity
        if room > length:
            bisect.insort(rooms, room - length)
    return packs
