"""Reads what a safetensors file says it holds, without torch and without its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import IO, NamedTuple

from soup_flows.json_text import parse_object

HEADER_LIMIT_BYTES = 100_000_000
"""Longest header that safetensors itself accepts (huggingface/safetensors, `MAX_HEADER_SIZE`)."""
MAX_DIMENSIONS = 64
"""No tensor has more; a shape without end would take for ever to multiply."""

_ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}


class Entry(NamedTuple):
    """One tensor of a header; its data is from `begin` to `end`, bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_table(file: IO[bytes], size: int, name: str) -> tuple[int, dict[str, Entry]]:
    """Return where the data begins, and every tensor of a header.

    The format is 8 bytes of header length (little endian), a JSON header, then the data
    (huggingface/safetensors, README, "Format").

    Args:
        file: opened at its beginning.
        size: of the file, in bytes.
        name: of the file, for messages.

    Raises:
        ValueError: the file is cut, or its header cannot be read.
        OSError: the file cannot be read.
    """
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, HEADER_LIMIT_BYTES):
        raise ValueError(f"{name}: the header is cut off, or this is no safetensors file")
    try:
        header = parse_object(file.read(length))
    except ValueError as error:
        raise ValueError(f"{name}: the header cannot be read: {error}") from None
    return 8 + length, {
        key: _entry(value, f"{name}: the entry of {key!r}")
        for key, value in header.items()
        if key != "__metadata__"
    }


def _entry(value: object, what: str) -> Entry:
    """Return one entry, whose numbers are whole and not negative."""
    dtype, shape, offsets = (
        (value.get("dtype"), value.get("shape"), value.get("data_offsets"))
        if isinstance(value, dict)
        else (None, None, None)
    )
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list)):
        raise ValueError(f"{what} cannot be read")
    if not all(type(n) is int and n >= 0 for n in (*shape, *offsets)) or len(offsets) != 2:
        raise ValueError(f"{what} has something other than sizes in it")
    if len(shape) > MAX_DIMENSIONS or offsets[0] > offsets[1]:
        raise ValueError(f"{what} makes no sense")
    return Entry(dtype, tuple(shape), *offsets)


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a safetensors file whose data ends where the file ends.

    Args:
        path: the file.

    Raises:
        ValueError: if the file is cut, or its header cannot be read or does not fit its data.
        OSError: if the file cannot be opened.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start, table = read_table(file, size, path.name)
    for name, entry in table.items():
        bits, held = _ITEM_BITS.get(entry.dtype), entry.end - entry.begin
        if bits is not None and held * 8 != bits * elements(entry.shape):
            raise ValueError(f"{path.name}: {name!r} has {held} bytes for shape {list(entry.shape)}")
    end = start + max((entry.end for entry in table.values()), default=0)
    if end != size:
        raise ValueError(f"{path.name}: {end} bytes are announced, the file has {size}")
    return {name: (entry.dtype, entry.shape) for name, entry in table.items()}


def elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return count
