"""A machine that is not this one: what was recorded on it."""

from __future__ import annotations

from pydantic import ValidationError

from soup_flows.errors import refuse
from soup_flows.hardware.values import Hardware
from soup_flows.user_file import BadFile, expanded, read_json

MAX_HARDWARE_BYTES = 1 << 20
"""Largest file that is read as a recorded machine, bytes; eight GPUs take about 30 kilobytes."""


def read_recorded(name: str, field: str) -> Hardware:
    """Read a machine that `soup-flows doctor --json` printed.

    Args:
        name: the file.
        field: where its name was given.

    Raises:
        Refused: `CLI003`.
    """
    try:
        value = read_json(expanded(name), MAX_HARDWARE_BYTES)
        return Hardware.model_validate(value.get("hardware", value))
    except (BadFile, ValidationError) as error:
        words = str(error) if isinstance(error, BadFile) else f"{name}: {_first(error)}"
        message = f"this is not a recorded machine: {words}"
        raise refuse("CLI003", field, message, "record one with soup-flows doctor --json") from None


def _first(error: ValidationError) -> str:
    """Return the first of pydantic's findings in one line."""
    item = error.errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, item['loc'])) or 'the value'}: {item['msg']}"
