"""Looks at a model's class without a weight: the model is on the meta device, no memory, no GPU."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from soup_flows.errors import kind_and_line
from soup_flows.spec import TrainingSpec
from soup_flows.training.model import (
    UnsuitableModel,
    add_adapters,
    packs,
    refuse_mixing,
    refuse_signature,
)
from soup_flows.validation.facts import look_at_model as look_at_folder

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
UNLEARNT = 0.05
"""Length of an embedding, as a share of the usual one, below which its token was never trained."""


def _empty_ids(spec: TrainingSpec) -> list[int]:
    """Return the token ids whose stored embedding is next to nothing beside the others."""
    if any(name in str(spec.lora.target_modules) for name in EMBEDDINGS):
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
    lengths = torch.cat([rows.float().norm(dim=1) for rows in table.split(8192)])
    small: list[int] = (lengths < UNLEARNT * lengths.median()).nonzero().flatten().tolist()
    return small


def look_at_model(spec: TrainingSpec) -> dict[str, Any]:
    """Build the model on the meta device, and its adapters where they are asked for."""
    found: dict[str, Any] = {}
    try:
        config = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.trust_remote_code)
    except Exception as error:  # whatever a model class can raise
        return {"model_error": kind_and_line(error)}
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
        found["empty_ids"] = _empty_ids(spec)
        try:
            with torch.device("meta"):
                adapted = add_adapters(model, spec)
            found["adapters"] = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        except Exception as error:  # peft's own words about targets
            found["adapter_error"] = kind_and_line(error)
    return found
