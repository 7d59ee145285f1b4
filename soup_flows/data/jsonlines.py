"""JSON lines and JSON arrays as rows, one at a time, with a place for every fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from soup_flows.data.values import Dropped, Row, shown

MAX_ROW_BYTES = 64 * 2**20
"""Longest row that is read, in bytes. It bounds memory when a file has no line ends."""

_CHUNK_BYTES = 2**20
_SPACE = " \t\r\n"


class _DuplicateKeyError(ValueError):
    """A JSON object names a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def read_lines(file: IO[bytes], name: str) -> Iterator[Row | Dropped]:
    """Yield the rows of JSON lines; a byte-order mark, CRLF and blank lines are fine.

    Args:
        file: opened at its beginning, in binary.
        name: the path to put into rows.

    Yields:
        `Row`, or `Dropped` for a line that is no JSON object.
    """
    number = 0
    while data := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(data) > MAX_ROW_BYTES:
            found = f"more than {MAX_ROW_BYTES // 2**20} MiB without a line end"
            yield Dropped(number, "line too long", "", found, "one JSON object a line", name)
            while data and not data.endswith(b"\n"):
                data = file.readline(MAX_ROW_BYTES)
            continue
        data = data.removeprefix(b"\xef\xbb\xbf")  # files laid end to end have one in the middle
        if data.strip():
            yield parse_row(data, number, name)


def parse_row(data: bytes, line: int, name: str) -> Row | Dropped:
    """Parse one JSON object from UTF-8 `data`; any fault is returned as `Dropped` with its column."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at byte {error.start + 1} of the line"
        return Dropped(line, "not UTF-8", "", found, "UTF-8 text", name)
    try:
        value, end = _DECODER.raw_decode(text, _skip(text, 0))
    except ValueError as error:
        return _fault(text, line, name, error)
    except RecursionError:
        return Dropped(line, "JSON nested too deeply", "", shown(text), "one JSON object", name)
    rest = text[end:].strip(_SPACE)
    if rest:
        found = f"{shown(rest)} at column {_skip(text, end) + 1}"
        return Dropped(line, "text after the JSON value", "", found, "one JSON object a line", name)
    # Strict UTF-8 has no surrogates: only an escape can bring one in.
    return as_row(value, line, name, surrogates="\\ud" in text or "\\uD" in text)


def parse_cell(text: str) -> object:
    """Return the JSON value in a cell of text, as strictly as rows are read.

    Raises:
        ValueError: it is none, names a key twice, is nested too deeply, or holds half of a UTF-16 pair.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _surrogate(value, "") is not None:
        raise ValueError("lone surrogate in text")
    return value


def _fault(text: str, line: int, name: str, error: ValueError) -> Dropped:
    if isinstance(error, _DuplicateKeyError):
        return Dropped(line, "duplicate key", str(error), "the key twice", "each key once", name)
    if not isinstance(error, json.JSONDecodeError):  # an integer of more digits than Python converts
        return Dropped(line, "not valid JSON", "", str(error), "one JSON object a line", name)
    body = text.rstrip(_SPACE)
    cut = error.pos >= len(body) or error.msg.startswith("Unterminated string")
    near = body[max(0, error.pos - 12) : error.pos + 12]
    found = "the line ends early" if cut else f"{error.msg} near {shown(near)}"
    return Dropped(
        line, "not valid JSON", "", f"{found} (column {error.pos + 1})", "one JSON object a line", name
    )


def as_row(value: object, line: int, name: str, *, surrogates: bool = True) -> Row | Dropped:
    """Check a parsed value: it must be an object whose text can be written as UTF-8.

    Args:
        value: what was parsed.
        line: its line or number.
        name: the path to put into the row.
        surrogates: whether its text may hold any; False saves the search.
    """
    if not isinstance(value, dict):
        return Dropped(line, "not a JSON object", "", shown(value), "an object with named columns", name)
    place = _surrogate(value, "") if surrogates else None
    if place is not None:
        return Dropped(
            line, "lone surrogate in text", place, "half of a UTF-16 pair (\\ud800 ...)", "text", name
        )
    return Row(line, value, name)


def _surrogate(value: object, place: str) -> str | None:
    """Return where text stands that is not encodable as UTF-8, or None."""
    if isinstance(value, str):
        if value.isascii():
            return None
        try:
            value.encode()
        except UnicodeEncodeError:
            return place
    elif isinstance(value, dict):
        for key, inner in value.items():
            found = _surrogate(key, place)
            if found is None:
                found = _surrogate(inner, f"{place}.{key}" if place else key)
            if found is not None:
                return found
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found = _surrogate(inner, f"{place}[{index}]")
            if found is not None:
                return found
    return None


def read_values(file: IO[str], name: str) -> Iterator[Row | Dropped]:
    """Yield the rows of a JSON array, or of JSON objects one after the other, without reading all of it.

    Rows are numbered from 1. After a fault the place of the next row is not known, so the fault is the last
    item.

    Args:
        file: opened at its beginning, as text.
        name: the path to put into rows.
    """
    buffer, position, number, done = "", 0, 0, False
    array: bool | None = None
    size = _CHUNK_BYTES
    while True:
        position = _skip(buffer, position)
        if array is None and position < len(buffer):
            array = buffer[position] == "["
            position += array
            continue
        if position < len(buffer):
            if array and buffer[position] == "]":
                rest = (buffer[position + 1 :] + file.read(4096)).strip(_SPACE)
                if rest:
                    found = shown(rest[:40])
                    yield Dropped(number + 1, "text after the array", "", found, "the end of the file", name)
                return
            try:
                start = _comma(buffer, position, first=number == 0) if array else position
                value, end = _DECODER.raw_decode(buffer, start)
                if end == len(buffer) and not done:  # a number may go on, and the next sign decides
                    raise json.JSONDecodeError("more to read", buffer, end)
            except json.JSONDecodeError as error:
                if done or len(buffer) - position > MAX_ROW_BYTES:
                    found = f"{error.msg} near {shown(buffer[max(0, error.pos - 12) : error.pos + 12])}"
                    yield Dropped(number + 1, "not valid JSON", "", found, "a JSON array of objects", name)
                    return
            except (ValueError, RecursionError) as error:
                yield Dropped(number + 1, "not valid JSON", "", shown(str(error)), "each key once", name)
                return
            else:
                number += 1
                yield as_row(value, number, name)
                position, size = end, _CHUNK_BYTES
                continue
        elif done:
            if array:
                yield Dropped(number + 1, "not valid JSON", "", "the file ends early", "a closing ]", name)
            return
        chunk = file.read(size)
        done = not chunk
        size *= 2  # a long row is parsed again with each chunk: doubling keeps that linear
        buffer, position = buffer[position:] + chunk, 0


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _comma(buffer: str, position: int, *, first: bool) -> int:
    """Return where the next value of an array begins; there must be a comma unless it is the first."""
    if first:
        return position
    if buffer[position] != ",":
        raise json.JSONDecodeError("Expecting ',' delimiter", buffer, position)
    start = _skip(buffer, position + 1)
    if start >= len(buffer):
        raise json.JSONDecodeError("Expecting value", buffer, start)
    return start
