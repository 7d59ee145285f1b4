"""Looks at model, tokenizer and first rows without a weight: the model is on the meta device, no memory, no GPU."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
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
from soup_flows.validation.facts import look_at_model as look_at_folder

ROWS = 200
"""Rows that are encoded."""
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
UNLEARNT = 0.05
"""Length of an embedding, as a share of the usual one, below which its token was never trained."""


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
    trained: Counter[int] = Counter()
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
                trained.update({label for label in row.labels if label >= 0})
            else:
                lost[row.reason] += 1
    except Refused as refused:
        found["rows_error"] = refused.problems[0].message
    if spec.trains_adapters:
        found["unlearnt"] = _unlearnt(spec, tokenizer, [token for token, _ in trained.most_common()])
    return {**found, "kept": kept, "stop_trained": stops, "largest_id": largest, "lost": dict(lost)}


def _unlearnt(spec: TrainingSpec, tokenizer: Any, tokens: list[int]) -> list[str]:
    """Return those of `tokens` whose stored embedding is next to nothing beside the others."""
    targets = spec.lora.target_modules
    if any(name in str(targets) for name in EMBEDDINGS):
        return []
    facts = look_at_folder(spec.model)[0]
    name = next((key for key in facts.shards if key.endswith(tuple(f"{e}.weight" for e in EMBEDDINGS))), None)
    if name is None or facts.folder is None:
        return []
    try:
        with safe_open(str(facts.folder / facts.shards[name]), framework="pt") as stored:
            table = stored.get_tensor(name)
    except (OSError, SafetensorError):
        return []
    usual = table[:: max(1, len(table) // 1000)].float().norm(dim=1).median()
    known = [token for token in tokens if token < len(table)]
    small = table[known].float().norm(dim=1) < UNLEARNT * usual
    return [
        str(tokenizer.convert_ids_to_tokens(t)) for t, tiny in zip(known, small.tolist(), strict=True) if tiny
    ]


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
