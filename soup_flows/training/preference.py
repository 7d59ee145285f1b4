"""Preference tuning: TRL's `DPOTrainer` on the prepared pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from soup_flows.data.prepare import PreparedData
from soup_flows.spec import TrainingSpec
from soup_flows.training.model import lora_config
from soup_flows.training.rows import split_rows


def pairs_of(spec: TrainingSpec, data: PreparedData) -> tuple[Dataset, Dataset | None]:
    """Return the pairs to train on and the held-out ones; they are disjoint."""
    pairs = _read(data.train.entry)
    if data.evaluation is not None:
        return Dataset.from_list(pairs), Dataset.from_list(_read(data.evaluation.entry))
    if not data.eval_rows:
        return Dataset.from_list(pairs), None
    train, held_out = split_rows(len(pairs), data.eval_rows, spec.training.seed)
    return Dataset.from_list([pairs[i] for i in train]), Dataset.from_list([pairs[i] for i in held_out])


def _read(entry: str) -> list[dict[str, Any]]:
    with (Path(entry) / "pairs.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class PreferenceTrainer(DPOTrainer):
    """TRL's trainer; the model as it was before training is the reference.

    With adapters that is the model without them, else TRL loads a second copy and shards it like the first.
    """

    def create_optimizer(self, model: Any = None) -> Any:
        """Build the optimizer without empty parameter groups; see `SoupTrainer.create_optimizer`."""
        optimizer = super().create_optimizer(model)
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
        return optimizer


def preference_trainer(
    spec: TrainingSpec,
    data: PreparedData,
    arguments: DPOConfig,
    model: Any,
    tokenizer: Any,
    callbacks: list[Any],
) -> PreferenceTrainer:
    """Build the trainer; `arguments` must exist before `model` does."""
    train, held_out = pairs_of(spec, data)
    return PreferenceTrainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=callbacks,
        peft_config=lora_config(spec) if spec.trains_adapters else None,
    )
