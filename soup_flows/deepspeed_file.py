"""Read a DeepSpeed JSON that a user wrote, and say precisely what is wrong with it."""

from __future__ import annotations

import os
from typing import Any

from soup_flows.errors import refuse
from soup_flows.user_file import BadFile, read_json

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
    try:
        return read_json(path, MAX_CONFIG_BYTES)
    except BadFile as bad:
        raise refuse("DSF002", "deepspeed_config", str(bad), bad.fix) from None
