"""Transformers' `Trainer`, with our batches, a loss over trained tokens only, and an exact evaluation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name the whole field uses)
from transformers import Trainer, TrainerControl

from soup_flows.batch import Batch
from soup_flows.launch import rank
from soup_flows.training import attention
from soup_flows.training.batches import (
    IGNORED,
    StepLoader,
    StepSampler,
    TokenRows,
    eval_batches,
    flatten,
    pad,
)
from soup_flows.training.clock import WorkClock
from soup_flows.training.loss import loss_in_head, worth_it_from
from soup_flows.training.saving import SavingTrainer


class SoupTrainer(SavingTrainer, Trainer):
    """A `Trainer` whose loss is the mean over the trained tokens of the whole optimizer step.

    Args:
        batch: the batch arithmetic of the plan.
        eval_tokens: most tokens in one evaluation batch.
        packing: whether rows are laid end to end; else they are padded.
        kwargs: what `Trainer` takes; `train_dataset` and `eval_dataset` are `TokenRows`.
    """

    control: TrainerControl
    # compute_loss divides by the tokens of the whole step itself
    loss_is_scaled_for_ga = True

    def __init__(self, *, batch: Batch, eval_tokens: int, packing: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.batch = batch
        self.eval_tokens = eval_tokens
        self.packing = packing
        pad_id = self.processing_class.pad_token_id
        self.collate = flatten if packing else functools.partial(pad, pad_id=pad_id or 0)
        self.piecewise_from = worth_it_from(self.model)
        self.clock = WorkClock(self.args.device)
        self.step_tokens = 0
        """Tokens of this rank's rows in the present optimizer step."""

    def get_train_dataloader(self) -> StepLoader:
        """Return a loader of this rank's micro batches; accelerate must not shard it again."""
        rows: TokenRows = self.train_dataset
        sampler = StepSampler(rows.lengths, self.batch, self.args.process_index, self.args.seed)
        return StepLoader(
            rows, batch_sampler=sampler, collate_fn=self.collate, pin_memory=self.args.dataloader_pin_memory
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, torch.Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
        """Return the micro batches of one optimizer step, and its trained tokens over all ranks."""
        micro = list(itertools.islice(epoch_iterator, num_batches))
        self.step_tokens = sum(m["input_ids"].numel() for m in micro)
        if self.state.global_step + 1 in self.checkpointer.orders.skip_steps:
            micro = [self.collate([self.train_dataset.filler]) for _ in micro]
        tokens = torch.tensor(sum(int((m["shift_labels"] != IGNORED).sum()) for m in micro), device=device)
        if self.batch.world_size > 1:
            dist.all_reduce(tokens)
        return micro, tokens.clamp_(min=1)  # none in a step that is left out

    def token_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss and the number of trained tokens of one micro batch.

        Where rows are laid end to end, logits are computed at the trained positions only, and a few at a time.
        """
        labels = inputs["shift_labels"]
        if not self.packing:
            logits = model(**_without_labels(inputs), use_cache=False).logits
            kept = labels != IGNORED
            loss = F.cross_entropy(logits[kept].float(), labels[kept], reduction="sum")
            # a batch without a trained token must still have a graph: sharded models wait for its gradients
            return loss + 0.0 * logits[0, 0, 0].float(), kept.sum()
        keep = (labels[0] != IGNORED).nonzero().flatten()
        if not keep.numel():
            keep = torch.zeros(1, dtype=torch.long, device=labels.device)  # its label is IGNORED: loss 0
        kept = labels[0, keep]
        if keep.numel() >= self.piecewise_from:
            with loss_in_head(self.model, kept):
                loss = self.row_logits(model, inputs, keep).sum()
            return loss, (kept != IGNORED).sum()
        logits = self.row_logits(model, inputs, keep)
        loss = F.cross_entropy(logits.float(), kept, ignore_index=IGNORED, reduction="sum")
        return loss, (kept != IGNORED).sum()

    def row_logits(self, model: torch.nn.Module, inputs: dict[str, Any], keep: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows laid end to end, at the positions `keep`: (positions, vocabulary)."""
        given = _without_labels(inputs)
        if self.model.config._attn_implementation != attention.NAME:  # flash-attention
            borders = given.pop("row_borders")
            ends = torch.tensor(borders, dtype=torch.int32, device=keep.device)
            longest = max(end - start for start, end in itertools.pairwise(borders))
            given.update(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest)
        logits: torch.Tensor = model(**given, logits_to_keep=keep, use_cache=False).logits[0]
        return logits

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
        number, world_size = self.args.process_index, self.batch.world_size
        with torch.no_grad():
            for indices in eval_batches(rows.lengths, self.eval_tokens, number, world_size):
                inputs = self._prepare_inputs(self.collate([rows[i] for i in indices]))
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


def _without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in inputs.items() if key != "shift_labels"}
