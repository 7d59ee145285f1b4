"""A spec as a JSON or YAML file, and values laid over it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soup_flows.errors import refuse
from soup_flows.user_file import BadFile, expanded
from soup_flows.user_yaml import read_yaml

MAX_SPEC_BYTES = 32 * 1024
"""Largest file that is read, bytes; one with every setting has about three kilobytes."""


def read_spec_file(name: str, field: str) -> dict[str, Any]:
    """Return the settings in a file; YAML is a superset of JSON.

    Args:
        name: path of the file.
        field: the setting that names it, for the message.

    Raises:
        Refused: if it cannot be read or holds no settings.
    """
    try:
        return read_yaml(expanded(name), MAX_SPEC_BYTES)
    except BadFile as bad:
        raise refuse("CLI002", field, str(bad), bad.fix) from None


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above` over it, group by group."""
    merged = dict(below)
    for name, value in above.items():
        inner = merged.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(inner, value) if both else value  # type: ignore[arg-type]
    return merged
