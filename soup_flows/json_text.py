"""Parses JSON that somebody else wrote, or that a crash cut short: any text gives a value or a ValueError."""

from __future__ import annotations

import json
import math
from typing import Any

_LARGEST = 2**63


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, with nothing in it that cannot be counted with or written again.

    Numbers that are not finite, and whole numbers beyond 64 bits, become None; half of a UTF-16 pair becomes
    U+FFFD. `json.loads` passes all of them on, and raises RecursionError for deep nesting.

    Args:
        text: one JSON value; bytes are UTF-8.

    Raises:
        ValueError: it is no JSON, or nested too deeply. `json.JSONDecodeError`, which is one, says where.
    """
    try:
        value = json.loads(
            text.decode("utf-8") if isinstance(text, bytes) else text,
            parse_constant=lambda _: None,
            parse_float=_finite,
            parse_int=_whole,
        )
        mark: Any = "\\ud" if isinstance(text, str) else b"\\ud"
        return _writable(value) if mark in text.lower() else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the object of a JSON text; as `parse_json`, and ValueError for a value that is no object."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} instead of an object")
    return value


def whole_text(text: str, errors: str = "strict") -> str:
    r"""Return text whose UTF-16 pairs are the signs that they stand for.

    Args:
        text: what an escaping writer made, such as `\ud83d` and `\ude00` for one sign.
        errors: as of `bytes.decode`, for half a pair.

    Raises:
        UnicodeError: there is half a pair, under `strict`.
    """
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", errors)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _whole(text: str) -> int | None:
    value = int(text) if len(text) <= 20 else _LARGEST
    return value if -_LARGEST <= value < _LARGEST else None


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return whole_text(value, "replace")
    if isinstance(value, dict):
        return {_writable(key): _writable(inner) for key, inner in value.items()}
    return [_writable(inner) for inner in value] if isinstance(value, list) else value
