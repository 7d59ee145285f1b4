"""Reads files that a user names, and says precisely what is wrong with them; never blocks on a pipe or a device."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any


class BadFile(ValueError):
    """A file cannot be used.

    Attributes:
        what: the path and what is wrong, with line and column where there is one.
        fix: what to do about it.
    """

    def __init__(self, path: str | os.PathLike[str], what: str, fix: str) -> None:
        super().__init__(f"{os.fspath(path)}: {what}")
        self.fix = fix


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with its `~` replaced; that of a user who is not here stays, and so names no file."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def read_text(path: str | os.PathLike[str], max_bytes: int) -> str:
    """Return the text of a regular UTF-8 file.

    Raises:
        BadFile: it is missing, unreadable, not regular, larger than `max_bytes`, or not UTF-8.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadFile(path, f"cannot be opened: {reason}", "give the path of a readable file") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadFile(path, "is not a regular file", "give the path of a file")
    with os.fdopen(fd, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise BadFile(path, f"has more than {max_bytes} bytes", "give the right file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise BadFile(path, f"line {line} column {column}: not UTF-8", "save it as UTF-8") from None


def read_json(path: str | os.PathLike[str], max_bytes: int, *, strict: bool = True) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: a regular file.
        max_bytes: the largest file that is read.
        strict: refuse NaN, Infinity, and a key that is there twice; model configs have them.

    Raises:
        BadFile: as `read_text`, and for what is no JSON object.
    """
    text = read_text(path, max_bytes)
    hooks: dict[str, Any] = {"object_pairs_hook": _no_duplicates, "parse_constant": _no_constant}
    hooks |= {"parse_float": _finite, "parse_int": _finite_int}
    try:
        value = json.loads(text, **(hooks if strict else {}))
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        fix = "write strict JSON: double quotes, no comments, no comma before a closing bracket"
        raise BadFile(path, f"{where}: {error.msg}", fix) from None
    except _Found as found:
        raise BadFile(path, f"{found}, {_lines_with(text, found.token)}", found.fix) from None
    except UnicodeEncodeError:
        raise BadFile(path, "holds half of a UTF-16 pair", "write the text itself, without escapes") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting without end
        raise BadFile(path, f"cannot be parsed: {type(error).__name__}", "write plain JSON") from None
    if not isinstance(value, dict):
        raise BadFile(path, f"holds a JSON {type(value).__name__}", 'write an object: {"name": ...}')
    return value


class _Found(Exception):
    """Something strict JSON forbids, found while parsing; `token` says how to find its lines."""

    def __init__(self, message: str, token: str, fix: str) -> None:
        super().__init__(message)
        self.token = token
        self.fix = fix


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    block: dict[str, Any] = {}
    for key, value in pairs:
        if key in block:
            token = re.escape(json.dumps(key, ensure_ascii=False)) + r"\s*:"
            raise _Found(f"the key {key!r} is there twice in one object", token, "keep one of them")
        block[key] = value
    return block


def _no_constant(name: str) -> Any:
    raise _Found(f"{name} is not JSON", re.escape(name), "write a finite number")


def _finite(text: str) -> float:
    """Refuse what only becomes infinity, as 1e999 does: other readers of the file have no such number."""
    if not math.isfinite(value := float(text)):
        raise _Found(f"{text[:20]} is too large for a number", re.escape(text), "write a finite number")
    return value


def _finite_int(text: str) -> int:
    _finite(text)
    return int(text)


def _lines_with(text: str, token: str) -> str:
    """Say on which lines, and in which columns, `token` (a pattern) is; the first five places."""
    places = []
    for match in itertools.islice(re.finditer(token, text), 5):
        start = text.rfind("\n", 0, match.start())
        places.append(f"line {text.count(chr(10), 0, match.start()) + 1} column {match.start() - start}")
    return "found at " + ", ".join(places) if places else "written with escapes"
