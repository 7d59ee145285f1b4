"""Looks at model, tokenizer and first rows without a weight: `python -m soup_flows.training.look`.

Reads a `TrainingSpec` as JSON from standard input and prints one JSON object, the fields of
`soup_flows.validation.deep.Seen`. The model is built on the meta device: no memory, no GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections import Counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from soup_flows.data.formats import iter_examples
from soup_flows.data.masking import encode
from soup_flows.data.report import better_answer
from soup_flows.data.sources import is_here
from soup_flows.data.values import Dropped, Encoded
from soup_flows.errors import Refused
from soup_flows.spec import TrainingSpec
from soup_flows.training.model import (
    UnsuitableModel,
    add_adapters,
    load_tokenizer,
    packs,
    refuse_mixing,
    refuse_signature,
)

ROWS = 200
"""Rows that are encoded."""


def look_at_tokenizer(spec: TrainingSpec) -> dict[str, Any]:
    """Load the tokenizer and encode the first rows."""
    try:
        tokenizer = load_tokenizer(spec)
    except Exception as error:  # whatever a tokenizer file can raise
        return {"tokenizer_error": _short(error)}
    found: dict[str, Any] = {"tokens": len(tokenizer), "has_eos": tokenizer.eos_token_id is not None}
    lost: Counter[str] = Counter()
    kept = stops = largest = 0
    if not is_here(spec.dataset):
        return found
    try:
        for example in itertools.islice(iter_examples(spec.dataset), ROWS):
            row = (
                example
                if isinstance(example, Dropped)
                else encode(better_answer(example), tokenizer, spec.data.max_length, spec.data.train_on)
            )
            if isinstance(row, Encoded):
                kept, stops = kept + 1, stops + row.stop_trained
                largest = max(largest, *row.input_ids)
            else:
                lost[row.reason] += 1
    except Refused as refused:
        found["rows_error"] = refused.problems[0].message
    return {**found, "kept": kept, "stop_trained": stops, "largest_id": largest, "lost": dict(lost)}


def look_at_model(spec: TrainingSpec) -> dict[str, Any]:
    """Build the model on the meta device, and its adapters where they are asked for."""
    found: dict[str, Any] = {}
    try:
        config = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.trust_remote_code)
    except Exception as error:  # whatever a model class can raise
        return {"model_error": _short(error)}
    embedding = model.get_input_embeddings()
    found["embedding_rows"] = embedding.weight.shape[0] if embedding is not None else None
    classes = {type(module).__name__ for module in model.modules()}
    wrapped = set(model._no_split_modules or ())
    found |= {"wrap_classes": sorted(wrapped), "wrap_found": sorted(wrapped & classes)}
    if packs(spec):
        try:
            refuse_mixing(config)
            refuse_signature(model)
        except UnsuitableModel as error:
            found["packing_error"] = str(error)
    if spec.trains_adapters:
        try:
            with torch.device("meta"):
                adapted = add_adapters(model, spec)
            found["adapters"] = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        except Exception as error:  # peft's own words about targets
            found["adapter_error"] = _short(error)
    return found


def look_at(spec: TrainingSpec) -> dict[str, Any]:
    """Return the fields of `Seen`."""
    return look_at_tokenizer(spec) | look_at_model(spec)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


if __name__ == "__main__":
    asked = TrainingSpec.model_validate_json(sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):
        answer = look_at(asked)
    json.dump(answer, sys.stdout)
