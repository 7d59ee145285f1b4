"""Sizes and numbers as people read them."""

from __future__ import annotations

GIB = 1 << 30


def gib(size: int, digits: int = 1) -> str:
    """Return `size` (bytes) in GiB as text, with `digits` decimals."""
    return f"{size / GIB:.{digits}f} GiB"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 error`, `2 errors`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def ranks(count: int | str) -> str:
    """Return a number of ranks (or several numbers, as text) with its noun: `1 rank`, `2 or 4 ranks`."""
    return f"{count} rank" if str(count) == "1" else f"{count} ranks"


def whole(text: str) -> int | None:
    """Return the number that up to 18 plain digits write; None for anything else that a tool may have printed."""
    return int(text) if len(text) <= 18 and text.isascii() and text.isdecimal() else None
