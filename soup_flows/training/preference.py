"""Preference tuning: TRL's DPO, KTO and ORPO trainers on the prepared rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from soup_flows.data.prepare import PreparedData
from soup_flows.spec import TrainingSpec
from soup_flows.training.clock import WorkClock
from soup_flows.training.model import load_adapters, lora_config
from soup_flows.training.rows import split_rows
from soup_flows.training.saving import SavingTrainer

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


def classes_of(task: str) -> tuple[Any, Any]:
    """Return TRL's classes of the arguments and of the trainer for `dpo`, `kto` or `orpo`."""
    if task == "dpo":
        from trl import DPOConfig, DPOTrainer

        return DPOConfig, DPOTrainer
    if task == "kto":
        from trl import KTOConfig, KTOTrainer

        return KTOConfig, KTOTrainer
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL 1.16 keeps ORPO under trl.experimental
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return ORPOConfig, ORPOTrainer


def rows_of(spec: TrainingSpec, data: PreparedData) -> tuple[Dataset, Dataset | None]:
    """Return the rows to train on and the held-out ones; they are disjoint."""
    rows = _read(data.train.entry)
    held_out: list[dict[str, Any]] = []
    if data.evaluation is not None:
        held_out = _read(data.evaluation.entry)
    elif data.eval_rows:
        chosen, others = split_rows(len(rows), data.eval_rows, spec.training.seed)
        rows, held_out = [rows[i] for i in chosen], [rows[i] for i in others]
    train = Dataset.from_list(rows)
    if spec.training.task == "kto":
        # KTOTrainer reads in order, and compares each prompt with the answer of the row before it
        train = train.shuffle(seed=spec.training.seed)
    return train, Dataset.from_list(held_out) if held_out else None


def _read(entry: str) -> list[dict[str, Any]]:
    with (Path(entry) / "pairs.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Preference(SavingTrainer, _Base):
    """Put before one of TRL's trainers.

    For `dpo` and `kto` the model as it was before training is the reference: with adapters the model without
    them, else a second copy that TRL loads and shards like the first. `orpo` needs none.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clock = WorkClock(self.args.device)
        self.step_tokens = 0
        """Tokens of this rank's rows in the present optimizer step, padding included."""

    def get_batch_samples(self, *arguments: Any) -> Any:
        """Count the tokens of the step."""
        micro, items = super().get_batch_samples(*arguments)
        names = {n for m in micro for n in m if n.endswith("input_ids") and not n.startswith("prompt_")}
        self.step_tokens = sum(m[name].numel() for m in micro for name in names)
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
    arguments: Any,
    model: Any,
    tokenizer: Any,
    callbacks: list[Any],
    weights: str | None = None,
) -> Any:
    """Build the trainer; `arguments` must exist before `model` does.

    Args:
        spec: what was asked.
        data: the prepared rows.
        arguments: what `training_arguments` returned.
        model: without adapters.
        tokenizer: of the run.
        callbacks: of the run.
        weights: a checkpoint whose adapters are taken, or None.
    """
    _, base = classes_of(spec.training.task)
    train, held_out = rows_of(spec, data)
    trainer: Any = type(f"Soup{base.__name__}", (Preference, base), {})(
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
