"""The model as far as the planner knows it: from a local folder, never from its name."""

from __future__ import annotations

from typing import Any

from soup_flows.architecture import Architecture, from_folder, read_config
from soup_flows.errors import Refused, refuse
from soup_flows.user_file import BadFile, expanded


def read_model_config(model: str) -> dict[str, Any] | None:
    """Return a local model folder's `config.json`, or None for a Hub id.

    Raises:
        Refused: if `model` is a folder without a readable `config.json`, one whose known keys are wrong
            (all of them in one `PLAN011`), or looks like a path that is missing.
    """
    folder = expanded(model)
    if not folder.exists():
        if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
            raise refuse(
                "PLAN009", "model", f"there is no folder {model!r}", "give a model folder or a Hub id"
            )
        return None
    if not (folder / "config.json").is_file():
        raise refuse(
            "PLAN010", "model", f"{model!r} has no config.json", "give a folder made by save_pretrained()"
        )
    try:
        return read_config(folder)
    except BadFile as bad:
        raise refuse("PLAN011", "model", str(bad), "save the model again with save_pretrained()") from None


def known_model(model: str) -> tuple[Architecture | None, str]:
    """Return the shapes of a local model folder, or None and a sentence that says why there are none.

    What is wrong with the folder is reported by the validation, not here.
    """
    folder = expanded(model)
    if not (folder / "config.json").is_file():
        return None, "memory was not predicted: the model's config.json is not on this machine"
    try:
        return from_folder(folder), ""
    except Refused as refused:
        return None, f"memory was not predicted: {refused.problems[0].message}"
