"""Shapes from weight files: safetensors headers, and any table of parameter names and shapes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from soup_flows.architecture.value import Architecture, Layer, Linear, Source
from soup_flows.json_text import parse_object
from soup_flows.safetensors_header import read_table

Shapes = Mapping[str, tuple[int, ...]]

_LAYER = re.compile(r"\.(\d+)\.")


def header(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name to shape of every tensor in a safetensors file; only its header is read.

    Raises:
        ValueError: if the file is not a safetensors file, or its header is not sound.
    """
    with path.open("rb") as file:
        _, table = read_table(file, path.stat().st_size, str(path))
    return {name: entry.shape for name, entry in table.items()}


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of all tensors of a model folder, or None when it holds no complete safetensors set.

    Raises:
        ValueError: if a file is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = parse_object(index.read_bytes()).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ValueError(f"{index} has no weight_map that names a file for each tensor")
        paths = [folder / name for name in sorted(set(listed.values()))]
    else:
        paths = [folder / "model.safetensors"]
    if not all(path.is_file() for path in paths):
        return None
    return {name: shape for path in paths for name, shape in header(path).items()}


def index_parameters(folder: Path) -> int | None:
    """Return the parameter count that the safetensors index states, or None."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    try:
        stated = parse_object(index.read_bytes()).get("metadata", {}).get("total_parameters")
        return int(stated) if stated else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # `folder_shapes` has said so


def from_shapes(config: Mapping[str, Any], shapes: Shapes, source: Source) -> Architecture:
    """Return an architecture from parameter names and shapes, for families not written down here.

    Counts are exact. What the shapes cannot tell (norms, activation widths) is assumed to be as in Llama,
    and `notes` says so.

    Args:
        config: the model's config, as far as it is understood.
        shapes: parameter name to shape, shared parameters once.
        source: where the shapes come from.

    Raises:
        ValueError: if no layers can be told apart in the names.
    """
    by_layer: dict[tuple[str, int], dict[str, tuple[int, ...]]] = defaultdict(dict)
    outer: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        found = _LAYER.search(name)
        if found:
            by_layer[name[: found.start()], int(found[1])][name[found.end() :]] = shape
        else:
            outer[name] = shape
    if not by_layer:
        raise ValueError("no numbered layers among the parameter names")
    matrices = [(name, shape) for name, shape in outer.items() if len(shape) == 2]
    embedding = max((prod(s) for n, s in matrices if "head" not in n and "embed_out" not in n), default=0)
    head = max((prod(s) for n, s in matrices if "head" in n or "embed_out" in n), default=0)
    vocab = int(config.get("vocab_size") or max(shape[0] for _, shape in matrices))
    layers = _group([_layer(config, by_layer[i]) for i in sorted(by_layer)])
    return Architecture(
        model_type=str(config.get("model_type", "unknown")),
        hidden_size=_hidden(config, matrices, vocab),
        vocab_size=vocab,
        tied=head == 0,
        embedding_parameters=embedding,
        head_parameters=head,
        root_parameters=sum(prod(shape) for shape in outer.values()) - embedding - head,
        layers=layers,
        source=source,
        known=False,
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        notes=("parameters are counted, activation widths are assumed to be as in Llama",),
    )


def _hidden(config: Mapping[str, Any], matrices: Sequence[tuple[str, tuple[int, ...]]], vocab: int) -> int:
    """Return the hidden width from the config, else from the embedding."""
    for key in ("hidden_size", "n_embd", "d_model", "dim"):
        if config.get(key):
            return int(config[key])
    return next(shape[1] for _, shape in matrices if shape[0] == vocab)


def _layer(config: Mapping[str, Any], shapes: Shapes) -> Layer:
    """Return one layer from the shapes of its parameters."""
    linears, other = [], 0
    biases = {name.removesuffix(".bias") for name in shapes if name.endswith(".bias")}
    routed_width = 0
    for name, shape in shapes.items():
        owner = name.removesuffix(".weight")
        last = owner.rsplit(".", 1)[-1]
        if len(shape) == 2:
            d_out, d_in = shape
            expert = ".experts." in name
            bias = owner in biases and shapes[f"{owner}.bias"] == (d_out,)
            kind = "expert" if expert else "linear"
            linears.append(Linear(name=last, d_in=d_in, d_out=d_out, bias=bias, kind=kind))
            other -= d_out if bias else 0
        elif len(shape) == 3:
            linears.append(Linear(name=last, d_in=shape[2], d_out=shape[1], count=shape[0], kind="expert"))
            routed_width = max(routed_width, min(shape[1:]))
        else:
            other += prod(shape)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    hidden = int(
        config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or linears[0].d_in
    )
    kv = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or max(1, hidden // heads))
    wide = [max(x.d_in, x.d_out) for x in linears if x.kind == "linear"] or [4 * hidden]
    top_k = int(config.get("num_experts_per_tok") or 2) if any(x.kind == "expert" for x in linears) else 0
    return Layer(
        count=1,
        linears=tuple(linears),
        other_parameters=other,
        q_width=heads * head_dim,
        k_width=kv * head_dim,
        v_width=kv * head_dim,
        out_width=heads * head_dim,
        heads=heads,
        mlp_width=top_k * routed_width or int(config.get("intermediate_size") or max(wide)),
        routed=top_k,
    )


def _group(layers: list[Layer]) -> tuple[Layer, ...]:
    """Join neighbours that are alike."""
    grouped: list[Layer] = []
    for layer in layers:
        if grouped and grouped[-1].model_copy(update={"count": 1}) == layer:
            grouped[-1] = grouped[-1].model_copy(update={"count": grouped[-1].count + 1})
        else:
            grouped.append(layer)
    return tuple(grouped)
