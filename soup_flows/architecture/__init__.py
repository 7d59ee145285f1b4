"""Parameter counts and shapes of a model, from its config or its files, without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from soup_flows.architecture.check import check_config
from soup_flows.architecture.dense import FAMILIES, NotWritten, dense, gpt2, opt
from soup_flows.architecture.files import folder_shapes, from_shapes, index_parameters
from soup_flows.architecture.moe import deepseek, mixtral, qwen_moe
from soup_flows.architecture.value import Architecture, Layer, Linear
from soup_flows.errors import refuse
from soup_flows.json_text import parse_json
from soup_flows.user_file import BadFile, read_json

__all__ = [
    "Architecture",
    "Layer",
    "Linear",
    "count_on_meta",
    "from_config",
    "from_folder",
    "known_families",
    "read_config",
]

MAX_CONFIG_BYTES = 1 << 23
"""Largest config.json that is read, bytes; names of thousands of labels take one or two million."""

_OTHERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    "gpt2": gpt2,
    "opt": opt,
    "mixtral": mixtral,
    "qwen2_moe": qwen_moe,
    "qwen3_moe": qwen_moe,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
}


def known_families() -> tuple[str, ...]:
    """Return the `model_type`s whose shapes are written down here, in order of the alphabet."""
    return tuple(sorted({*FAMILIES, *_OTHERS}))


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the `config.json` of a model folder, its known keys checked.

    Raises:
        BadFile: there is no readable JSON object.
        Refused: `PLAN011` as in `check_config`.
    """
    config = read_json(Path(folder) / "config.json", MAX_CONFIG_BYTES, strict=False)
    check_config(config, known_families())
    return config


def from_config(config: Mapping[str, Any], *, count_unknown: bool = True) -> Architecture:
    """Return the architecture that a `config.json` describes.

    Args:
        config: the content of `config.json`.
        count_unknown: count families that are not written down here on the meta device, in a child process
            that imports torch and transformers (some seconds).

    Raises:
        Refused: `MEM001` if the config is of an unknown family that cannot be counted, or lacks a size.
    """
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES and kind not in _OTHERS:
        if count_unknown and kind:
            return count_on_meta(config)
        what = f"model_type {kind!r} is not one of {', '.join(known_families())}"
        raise refuse(
            "MEM001", "model", what, "give the weight files as safetensors, or install the train extra"
        )
    try:
        return _OTHERS[kind](config) if kind in _OTHERS else dense(config, FAMILIES[kind])
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, NotWritten) and count_unknown:
            return count_on_meta(config)
        missing = f"lacks {error.args[0]!r}" if isinstance(error, KeyError) else f"is wrong: {error}"
        raise refuse("MEM001", "model", f"the {kind} config {missing}", "complete config.json") from None


def from_folder(folder: str | Path, *, count_unknown: bool = True) -> Architecture:
    """Return the architecture of a model folder: its `config.json`, checked against its weight files.

    Args:
        folder: folder with `config.json` and, if there are any, safetensors files (headers are read only).
        count_unknown: see `from_config`; used only when there are no weight files to read shapes from.

    Raises:
        Refused: `MEM002` if there is no readable `config.json`; `PLAN011` as in `read_config`; `MEM001` as in
            `from_config`.
    """
    folder = Path(folder)
    try:
        config = read_config(folder)
    except BadFile as bad:
        raise refuse("MEM002", "model", str(bad), "give a folder that holds config.json") from None
    broken: tuple[str, ...] = ()
    shapes = None
    try:
        shapes = folder_shapes(folder)
    except (OSError, ValueError) as error:
        broken = (f"weight files could not be read: {error}",)
    if config.get("model_type") not in known_families() and shapes:
        try:
            return from_shapes(config, shapes, "files")
        except (ValueError, TypeError, IndexError, StopIteration) as error:
            what = f"the shapes in the weight files make no model that is understood: {error}"
            raise refuse("MEM001", "model", what, "check config.json and the weight files") from None
    found = from_config(config, count_unknown=count_unknown)
    stored = sum(_size(shape) for shape in shapes.values()) if shapes else index_parameters(folder)
    if stored is not None and stored != found.parameters:
        broken += (f"the weight files hold {stored:,} elements, the config means {found.parameters:,}",)
    return found.model_copy(update={"notes": found.notes + broken}) if broken else found


def count_on_meta(config: Mapping[str, Any], timeout_s: float = 180.0) -> Architecture:
    """Return the architecture of any family by building its class on the meta device in a child process.

    Args:
        config: the content of `config.json`; its family must be part of transformers.
        timeout_s: seconds the child may take.

    Raises:
        Refused: `MEM001` with the child's last line if it cannot build the model.
    """
    argv = [sys.executable, "-m", "soup_flows.training.meta_count"]
    kind = config.get("model_type")
    try:
        done = subprocess.run(
            argv,
            input=json.dumps(dict(config)),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
    except subprocess.TimeoutExpired:
        what = f"counting model_type {kind!r} on the meta device took more than {timeout_s:.0f} s"
        raise refuse("MEM001", "model", what, "give the weight files as safetensors") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        why = "".join(c if c.isprintable() else repr(c)[1:-1] for c in last)  # it may quote the config
        what = f"model_type {kind!r} is not written down here and could not be counted: {why}"
        fix = "use a family of transformers, or give the weight files as safetensors"
        raise refuse("MEM001", "model", what, fix) from None
    shapes = {name: tuple(shape) for name, shape in parse_json(done.stdout).items()}
    try:
        return from_shapes(config, shapes, "meta")
    except (ValueError, TypeError, IndexError, StopIteration) as error:
        what = f"model_type {kind!r} has shapes that make no model that is understood: {error}"
        raise refuse("MEM001", "model", what, "give the weight files as safetensors") from None


def _size(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    size = 1
    for length in shape:
        size *= length
    return size
