"""Reads what a safetensors file says it holds, without torch and without its tensors."""

from __future__ import annotations

import json
from pathlib import Path

HEADER_LIMIT_BYTES = 100_000_000
"""Longest header that safetensors itself accepts (huggingface/safetensors, `MAX_HEADER_SIZE`)."""

_ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a safetensors file.

    The format is 8 bytes of header length (little endian), a JSON header, then the data; the data must end
    where the file ends (huggingface/safetensors, README, "Format").

    Args:
        path: the file.

    Raises:
        ValueError: if the file is cut, or its header cannot be read or does not fit its data.
        OSError: if the file cannot be opened.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT_BYTES):
            raise ValueError(f"{path.name}: the header is cut off")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{path.name}: the header is no JSON object")
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            begin, stop = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path.name}: the entry of {name!r} cannot be read") from None
        bits = _ITEM_BITS.get(dtype)
        if bits is not None and (stop - begin) * 8 != bits * elements(shape):
            raise ValueError(f"{path.name}: {name!r} has {stop - begin} bytes for shape {list(shape)}")
        end = max(end, stop)
        found[name] = (dtype, shape)
    if 8 + length + end != size:
        raise ValueError(f"{path.name}: {8 + length + end} bytes are announced, the file has {size}")
    return found


def elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return count
