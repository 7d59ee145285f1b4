"""A spec as a JSON or YAML file, and values laid over it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from soup_flows.errors import refuse


def read_spec_file(name: str, field: str) -> dict[str, Any]:
    """Return the settings in a file; YAML is a superset of JSON.

    Args:
        name: path of the file.
        field: the setting that names it, for the message.

    Raises:
        Refused: if it cannot be read or holds no settings.
    """
    try:
        value = yaml.safe_load(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        message = f"{name!r} cannot be read: {error}"
        raise refuse("CLI002", field, message, "give a JSON or YAML file") from None
    if not isinstance(value, dict):
        raise refuse("CLI002", field, f"{name!r} holds no settings", "write `model: ...` and so on")
    return value


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above` over it, group by group."""
    merged = dict(below)
    for name, value in above.items():
        inner = merged.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(inner, value) if both else value  # type: ignore[arg-type]
    return merged
