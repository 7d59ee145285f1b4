"""Transformers' `Trainer`, with our batches, a loss over trained tokens only, and an exact evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name the whole field uses)
from transformers import TrainerControl

from soup_flows.batch import Batch
from soup_flows.launch import rank
from soup_flows.training.batches import (
    IGNORED,
    StepLoader,
    StepSampler,
    TokenRows,
    eval_batches,
    flatten,
)
from soup_flows.training.clock import WorkClock
from soup_flows.training.saving import SavingTrainer


class SoupTrainer(SavingTrainer):
    """A `Trainer` whose loss is the mean over the trained tokens of the whole optimizer step.

    Args:
        batch: the batch arithmetic of the plan.
        eval_tokens: most tokens in one evaluation batch.
        kwargs: what `Trainer` takes; `train_dataset` and `eval_dataset` are `TokenRows`.
    """

    control: TrainerControl
    # compute_loss divides by the tokens of the whole step itself
    loss_is_scaled_for_ga = True

    def __init__(self, *, batch: Batch, eval_tokens: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.batch = batch
        self.eval_tokens = eval_tokens
        self.clock = WorkClock(self.args.device)
        self.step_tokens = 0
        """Tokens of this rank's rows in the present optimizer step."""

    def get_train_dataloader(self) -> StepLoader:
        """Return a loader of this rank's micro batches; accelerate must not shard it again."""
        rows: TokenRows = self.train_dataset
        lengths = [len(row.input_ids) for row in rows.rows]
        sampler = StepSampler(lengths, self.batch, self.args.process_index, self.args.seed)
        return StepLoader(
            rows, batch_sampler=sampler, collate_fn=flatten, pin_memory=self.args.dataloader_pin_memory
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, torch.Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
        """Return the micro batches of one optimizer step, and its trained tokens over all ranks."""
        micro = list(itertools.islice(epoch_iterator, num_batches))
        self.step_tokens = sum(m["input_ids"].numel() for m in micro)
        if self.state.global_step + 1 in self.checkpointer.orders.skip_steps:
            micro = [flatten([self.train_dataset.filler]) for _ in micro]
        tokens = torch.tensor(sum(int((m["shift_labels"] != IGNORED).sum()) for m in micro), device=device)
        if self.batch.world_size > 1:
            dist.all_reduce(tokens)
        return micro, tokens.clamp_(min=1)  # none in a step that is left out

    def token_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss and the number of trained tokens of one micro batch.

        Logits are computed at the trained positions only.
        """
        labels = inputs["shift_labels"][0]
        keep = (labels != IGNORED).nonzero().flatten()
        if not keep.numel():
            keep = torch.zeros(1, dtype=torch.long, device=labels.device)  # its label is IGNORED: loss 0
        outputs = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            cu_seq_lens=inputs["cu_seq_lens"],
            logits_to_keep=keep,
            use_cache=False,
        )
        kept = labels[keep]
        loss = F.cross_entropy(outputs.logits[0].float(), kept, ignore_index=IGNORED, reduction="sum")
        return loss, (kept != IGNORED).sum()

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: ARG002 (Trainer's signature)
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Return the micro batch's part of the step's mean loss; gradients are averaged over the ranks."""
        with self.clock.forward():
            loss, _ = self.token_loss(model, inputs)
        assert num_items_in_batch is not None
        return loss / num_items_in_batch * self.batch.world_size

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Compute the mean loss over every trained token of the held-out rows, each counted once."""
        rank.heartbeat(self.state.global_step, "evaluate")
        rows: TokenRows = self.eval_dataset
        model = self.model_wrapped
        was_training = model.training
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        lengths = [len(row.input_ids) for row in rows.rows]
        number, world_size = self.args.process_index, self.batch.world_size
        with torch.no_grad():
            for indices in eval_batches(lengths, self.eval_tokens, number, world_size):
                inputs = self._prepare_inputs(flatten([rows[i] for i in indices]))
                with self.compute_loss_context_manager():
                    loss, tokens = self.token_loss(model, inputs)
                total += torch.stack([loss.double(), tokens.double()])
        if world_size > 1:
            dist.all_reduce(total)
        if was_training:
            model.train()
        rank.heartbeat(self.state.global_step)
        metrics = {
            f"{metric_key_prefix}_loss": (total[0] / total[1]).item(),
            f"{metric_key_prefix}_tokens": int(total[1].item()),
        }
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimizer without empty parameter groups.

        With adapters the group without weight decay is empty; DeepSpeed drops it and the scheduler, which
        remembers two groups, fails at its first step with torch >= 2.13 (MakazhanAlpamys/Soup#336).
        """
        optimizer = super().create_optimizer(model)
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
        return optimizer
