"""Preference tuning: TRL's `DPOTrainer` on the prepared pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from soup_flows.data.prepare import PreparedData
from soup_flows.spec import TrainingSpec
from soup_flows.training.clock import WorkClock
from soup_flows.training.model import load_adapters, lora_config
from soup_flows.training.rows import split_rows
from soup_flows.training.saving import SavingTrainer


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


class PreferenceTrainer(SavingTrainer, DPOTrainer):
    """TRL's trainer; the model as it was before training is the reference.

    With adapters that is the model without them, else TRL loads a second copy and shards it like the first.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clock = WorkClock(self.args.device)
        self.step_tokens = 0
        """Tokens of this rank's pairs in the present optimizer step, padding included."""

    def get_batch_samples(self, *arguments: Any) -> Any:
        """Count the tokens of the step."""
        micro, items = super().get_batch_samples(*arguments)
        self.step_tokens = sum(m["input_ids"].numel() for m in micro)
        return micro, items

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """Time the forward pass."""
        with self.clock.forward():
            return super().compute_loss(*arguments, **options)

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
    weights: str | None = None,
) -> PreferenceTrainer:
    """Build the trainer; `arguments` must exist before `model` does.

    Args:
        spec: what was asked.
        data: the prepared pairs.
        arguments: what `training_arguments` returned.
        model: without adapters.
        tokenizer: of the run.
        callbacks: of the run.
        weights: a checkpoint whose adapters are taken, or None.
    """
    train, held_out = pairs_of(spec, data)
    trainer = PreferenceTrainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=callbacks,
        peft_config=lora_config(spec) if spec.trains_adapters else None,
    )
    if weights and spec.trains_adapters:
        load_adapters(trainer.model, Path(weights))
    return trainer
