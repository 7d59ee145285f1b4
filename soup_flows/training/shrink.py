"""Write a small copy of a model and a few rows: `python -m soup_flows.training.shrink REQUEST ANSWER`.

The copy is of the same class with the same vocabulary, tokenizer and kinds of layers; only their number and the
widths are smaller. `soup_flows.rehearse` trains it.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from soup_flows.child import answer
from soup_flows.data.formats import iter_examples
from soup_flows.data.masking import encode
from soup_flows.data.prepare import settings_of
from soup_flows.data.reading import read_rows
from soup_flows.data.report import better_answer
from soup_flows.data.values import Dropped, Encoded, Row
from soup_flows.errors import Refused, kind_and_line, refuse
from soup_flows.paths import write_json
from soup_flows.spec import TrainingSpec
from soup_flows.training.prepare import load_tokenizer, tokenizer_folder

LAYERS, HEAD_DIM, KV_HEADS = 2, 16, 2
LARGEST = 400_000_000
"""Most parameters of a copy that is rehearsed with; a wide vocabulary is most of them."""
LOOK_AT = 1000
"""Rows among which those that fit a short length are looked for."""
SHORTEST = 128
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
HIDDEN, HEADS = ("hidden_size", "n_embd", "d_model"), ("num_attention_heads", "n_head", "n_heads")
KV = ("num_key_value_heads", "num_kv_heads")
FEED_FORWARD = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size",
                "shared_expert_intermediate_size", "intermediate_size_mlp")  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
          "v_head_dim": 16, "index_head_dim": 16}  # fmt: skip
"""Sizes of multi-head latent attention (DeepSeek) in a copy."""
PERIODS = ("full_attention_interval", "attn_layer_period", "expert_layer_period", "sliding_window_pattern")


def shrink(spec: TrainingSpec, folder: Path) -> dict[str, Any]:
    """Write the copy into `folder` and return its class, its parameters and what was changed.

    Narrow first; a class that cannot be built or run so keeps its widths and loses layers alone.

    Raises:
        Refused: if no copy of bearable size can be built and run.
    """
    source = tokenizer_folder(spec)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS):
            shutil.copy(file, folder / file.name)
    original = json.loads((source / "config.json").read_text(encoding="utf-8"))
    reason = ""
    for narrow in (True, False):
        config, changes = smaller(original, narrow)
        write_json(folder / "config.json", config)
        try:
            model = _build(spec, folder)
        except Exception as error:  # whatever a model class says of sizes that do not go together
            reason = reason or kind_and_line(error)
            continue
        model.save_pretrained(folder)
        write_json(folder / "config.json", config)  # as it was written by its owner, code of its own included
        return {"class": type(model).__name__, "parameters": model.num_parameters(), "changes": changes}
    raise refuse(
        "RH004",
        "validation.rehearse",
        f"no small copy of {spec.model} could be made ({reason})",
        "set validation.rehearse=false for this model",
    )


def _build(spec: TrainingSpec, folder: Path) -> Any:
    """Build the copy with random weights and run it once."""
    trust = spec.trust_remote_code
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    with torch.device("meta"):
        size = sum(
            p.numel() for p in AutoModelForCausalLM.from_config(config, trust_remote_code=trust).parameters()
        )
    if size > LARGEST:
        raise ValueError(f"it would have {size:,} parameters, {LARGEST:,} at most are rehearsed with")
    torch.manual_seed(spec.training.seed)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust, dtype=torch.float32)
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    named = getattr(config, "dtype", None)
    return model.to(named if named in (torch.bfloat16, torch.float16) else torch.float32)


def smaller(original: dict[str, Any], narrow: bool) -> tuple[dict[str, Any], list[str]]:
    """Return a config with fewer layers, and with smaller widths if `narrow`; and what was changed.

    Ratios that the classes rely on are kept: query heads per key head, experts per token, one feed-forward width
    per layer width, every kind of layer.
    """
    config = json.loads(json.dumps(original))
    config.pop("quantization_config", None)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    for part in [config, *(value for value in config.values() if isinstance(value, dict))]:
        _fewer_layers(part)
    if narrow:
        _narrower(text)
    before = original.get("text_config") if text is not config else original
    before = before if isinstance(before, dict) else original
    changes = [
        f"{name} {before[name]} -> {value}"
        for name, value in text.items()
        if name in (*DEPTHS, *HIDDEN, *EXPERTS) and before.get(name) != value
    ]
    return config, changes


def _fewer_layers(part: dict[str, Any]) -> None:
    """Keep as many layers as it takes to have every kind of them, two at least."""
    name = next((n for n in DEPTHS if isinstance(part.get(n), int)), None)
    if name is None:
        return
    layers = part[name]
    keep = max([LAYERS, *(part[p] for p in PERIODS if isinstance(part.get(p), int))])
    lists = {k: v for k, v in part.items() if isinstance(v, list) and len(v) == layers}
    for values in lists.values():
        kinds = {str(value) for value in values}
        while keep < layers and len({str(value) for value in values[:keep]}) < min(len(kinds), 4):
            keep += 1
    keep = min(keep, layers)
    part[name] = keep
    part.update({k: v[:keep] for k, v in lists.items()})
    if isinstance(part.get("first_k_dense_replace"), int):
        part["first_k_dense_replace"] = min(part["first_k_dense_replace"], 1)


def _narrower(text: dict[str, Any]) -> None:
    """Make the layers narrow; a config whose sizes are not known here keeps them."""
    hidden, heads, kv = (next((n for n in names if isinstance(text.get(n), int)), None)
                         for names in (HIDDEN, HEADS, KV))  # fmt: skip
    if hidden is None or heads is None or "mrope_section" in json.dumps(text):
        return
    head_dim = text.get("head_dim") or text[hidden] // text[heads]
    if kv is not None and text[heads] % text[kv] == 0:
        group, text[kv] = text[heads] // text[kv], min(text[kv], KV_HEADS)
        text[heads] = group * text[kv]
    else:
        text[heads] = min(text[heads], 2 * KV_HEADS)
    small = min(head_dim, HEAD_DIM)
    for name in ("head_dim", "rotary_dim"):
        if isinstance(text.get(name), int):
            text[name] = min(text[name], small)
    width = min(text[hidden], text[heads] * small)
    text[hidden] = width
    for name in FEED_FORWARD:
        if isinstance(text.get(name), int) and text[name]:
            text[name] = min(text[name], 2 * width)
    if isinstance(text.get("word_embed_proj_dim"), int):
        text["word_embed_proj_dim"] = min(text["word_embed_proj_dim"], width)
    chosen = text.get("num_experts_per_tok") or 1
    for name in EXPERTS:
        if isinstance(text.get(name), int):
            text[name] = min(text[name], max(4, chosen))
    for name, size in LATENT.items():
        if isinstance(text.get(name), int):
            text[name] = min(text[name], size)
    text.update({name: 1 for name in ("n_group", "topk_group") if isinstance(text.get(name), int)})


def short_rows(spec: TrainingSpec, source: str, wanted: int, into: Path) -> tuple[int, int]:
    """Write the first rows of `source` that teach something within few tokens.

    Args:
        spec: what was asked.
        source: the data set.
        wanted: rows to write.
        into: the JSON lines to write.

    Returns:
        How many rows there are, and the length in tokens they need: 128, or doubled until there are enough.
    """
    rows = list(itertools.islice((r for r in read_rows(source) if isinstance(r, Row)), LOOK_AT))
    lines = [json.dumps(row.value, ensure_ascii=False, default=str) + "\n" for row in rows]
    into.write_text("".join(lines), encoding="utf-8")
    tokenizer = load_tokenizer(spec)
    length = min(SHORTEST, spec.data.max_length)
    good = list(_teaching(spec, tokenizer, into, length))
    while len(good) < wanted and length < spec.data.max_length:
        length = min(2 * length, spec.data.max_length)
        good = list(_teaching(spec, tokenizer, into, length))
    chosen = [lines[number - 1] for number in good[:wanted]] or lines[:wanted]
    into.write_text("".join(chosen), encoding="utf-8")
    return len(chosen), length


def _teaching(spec: TrainingSpec, tokenizer: Any, path: Path, length: int) -> Iterator[int]:
    """Yield the line numbers of the rows that have a trained token within `length` tokens."""
    train_on = settings_of(spec).train_on
    try:
        for item in iter_examples(path):
            if isinstance(item, Dropped):
                continue
            if isinstance(encode(better_answer(item), tokenizer, length, train_on), Encoded):
                yield item.line
    except Refused:  # rows that cannot be read at all: the ranks say so in their own words
        return


def work(text: str) -> dict[str, Any]:
    """Do what `soup_flows.rehearse` asks; see there for the request and the answer."""
    asked = json.loads(text)
    spec, folder = TrainingSpec.model_validate(asked["spec"]), Path(asked["folder"])
    found = shrink(spec, folder / "model")
    rows, length = short_rows(spec, spec.dataset, asked["rows"], folder / "rows.jsonl")
    if spec.data.eval_dataset:
        _, longer = short_rows(spec, spec.data.eval_dataset, asked["eval_rows"], folder / "eval.jsonl")
        length = max(length, longer)
    return {**found, "rows": rows, "max_length": length}


if __name__ == "__main__":
    raise SystemExit(answer(sys.argv[1:], work))
