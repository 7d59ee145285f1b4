"""Sizes as people read them."""

from __future__ import annotations

GIB = 1 << 30


def gib(size: int, digits: int = 1) -> str:
    """Return `size` (bytes) in GiB as text, with `digits` decimals."""
    return f"{size / GIB:.{digits}f} GiB"
