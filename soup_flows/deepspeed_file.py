"""Read a DeepSpeed JSON that a user wrote, and say precisely what is wrong with it."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from typing import Any

from soup_flows.errors import Refused, refuse

MAX_CONFIG_BYTES = 1 << 20
"""Largest file that is read as a DeepSpeed config, bytes; real ones have a few kilobytes."""


def load_deepspeed_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a user's DeepSpeed JSON for inspection; the file itself is used as it is.

    Args:
        path: a regular file with one JSON object.

    Raises:
        Refused: a ValueError on field `deepspeed_config` that says what is wrong and where: the file is
            missing, unreadable, not regular, larger than `MAX_CONFIG_BYTES`, not UTF-8, not strict JSON,
            holds a key twice, or is not an object.
    """
    text = _read_text(os.fspath(path))
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        fix = "write strict JSON: double quotes, no comments, no comma before a closing bracket"
        raise _bad_file(path, f"{where}: {error.msg}", fix) from None
    except _Found as found:
        lines = _lines_with(text, found.token)
        raise _bad_file(path, f"{found}, {lines}", found.fix) from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting without end
        raise _bad_file(path, f"cannot be parsed: {type(error).__name__}", "write a plain config") from None
    if not isinstance(value, dict):
        raise _bad_file(
            path, f"holds a JSON {type(value).__name__}", 'write an object: {"zero_optimization": ...}'
        )
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


def _lines_with(text: str, token: str) -> str:
    """Say on which lines, and in which columns, `token` (a pattern) is; the first five places."""
    places = []
    for match in itertools.islice(re.finditer(token, text), 5):
        start = text.rfind("\n", 0, match.start())
        places.append(f"line {text.count(chr(10), 0, match.start()) + 1} column {match.start() - start}")
    return "found at " + ", ".join(places) if places else "written with escapes"


def _read_text(path: str) -> str:
    """Return the text of a regular UTF-8 file of bearable size, without ever blocking on a pipe or device."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _bad_file(path, f"cannot be opened: {reason}", "give the path of a readable file") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _bad_file(path, "is not a regular file", "give the path of a JSON file")
    with os.fdopen(fd, "rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise _bad_file(path, f"has more than {MAX_CONFIG_BYTES} bytes", "give a DeepSpeed config")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise _bad_file(path, f"line {line} column {column}: not UTF-8", "save it as UTF-8") from None


def _bad_file(path: str | os.PathLike[str], what: str, fix: str) -> Refused:
    return refuse("DSF002", "deepspeed_config", f"{os.fspath(path)}: {what}", fix)
