"""Early stopping and the best checkpoint: decided from the logged evaluations, which every rank sees alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from soup_flows import checkpoints

if TYPE_CHECKING:
    from soup_flows.training.run import Job

NEAR = {"fp32": 1e-3, "bf16": 0.02, "fp16": 0.02}
"""How far, as a share, the loss of a loaded checkpoint may be from the loss it was saved with."""


class BestModelWrong(RuntimeError):
    """The checkpoint that was loaded as the best one is not what was evaluated."""

    failure_class = "proof_failed"
    advice = "Keep the run's folder and report it. Set training.load_best_model_at_end=false to go without."


@dataclass(frozen=True)
class Verdict:
    """What the evaluations so far say.

    Attributes:
        step: optimizer step of the lowest held-out loss; None without an evaluation.
        loss: that loss.
        waited: evaluations since the last improvement by more than the threshold.
    """

    step: int | None
    loss: float
    waited: int


def judge(evaluations: Sequence[tuple[int, float]], threshold: float = 0.0) -> Verdict:
    """Find the best evaluation and count those since the last improvement.

    An evaluation improves when it is lower than all before it by more than `threshold`, as Transformers'
    `EarlyStoppingCallback` has it.

    Args:
        evaluations: (optimizer step, held-out loss), in the order they were made.
        threshold: smallest improvement that counts.
    """
    step, best, waited = None, math.inf, 0
    for at, loss in evaluations:
        waited = 0 if best - loss > threshold else waited + 1
        if loss < best:
            step, best = at, loss
    return Verdict(step, best, waited)


def evaluations_of(state: Any) -> list[tuple[int, float]]:
    """Return the evaluations in a trainer's log, without the one before the first step: it has no checkpoint."""
    log = state.log_history
    return [(entry["step"], entry["eval_loss"]) for entry in log if "eval_loss" in entry and entry["step"]]


class BestModel(TrainerCallback):
    """Saves each best evaluation's checkpoint, and stops when none has come for a while.

    The log of evaluations is part of every checkpoint, so that a resumed run goes on counting.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.keeps = job.spec.training.load_best_model_at_end

    def verdict(self, state: Any) -> Verdict:
        """Judge all evaluations of the run so far."""
        return judge(evaluations_of(state), self.job.spec.training.early_stopping_threshold)

    def spared(self, state: Any) -> set[str]:
        """Return the names of checkpoints that rotation leaves alone."""
        step = self.verdict(state).step if self.keeps else None
        return set() if step is None else {f"checkpoint-{step}"}

    def on_evaluate(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask for a save, or the end; the last step is saved as the final model anyway."""
        step, patience = state.global_step, self.job.spec.training.early_stopping_patience
        if not 0 < step < state.max_steps or control.should_training_stop:
            return
        found = self.verdict(state)
        if self.keeps and found.step == step:
            control.should_save = True
        if patience is not None and found.waited >= patience:
            control.should_training_stop = True
            if self.job.is_main:
                self.job.events.write("early_stop", step=step, best_step=found.step, waited=found.waited)


def final_evaluation(trainer: Any) -> dict[str, float]:
    """Return the evaluation of the last step, made now unless Trainer has just made it; a collective call."""
    last = next((entry for entry in reversed(trainer.state.log_history) if "eval_loss" in entry), None)
    if last is not None and last["step"] == trainer.state.global_step > 0:
        return dict(last)
    found: dict[str, float] = trainer.evaluate()
    return found


def restore_best(job: Job, trainer: Any, final: dict[str, float]) -> dict[str, float]:
    """Put the best checkpoint's weights into the model, unless the last ones are as good; a collective call.

    Args:
        job: what the rank was told.
        trainer: after training.
        final: the evaluation of the last weights.

    Returns:
        The evaluation of the weights that the model has now.

    Raises:
        BestModelWrong: if the loaded weights do not have the loss they were saved with.
    """
    if not job.spec.training.load_best_model_at_end:
        return final
    last_step, last_loss = trainer.state.global_step, final["eval_loss"]
    earlier = [(step, loss) for step, loss in evaluations_of(trainer.state) if step < last_step]
    better = dict(sorted(((s, x) for s, x in earlier if x < last_loss), key=lambda e: (-e[1], e[0])))
    step = 0
    if job.is_main:  # the best first
        step = next((s for s in reversed(better) if _folder(job, s) is not None), 0)
    step = trainer.checkpointer.agree_on(step)
    folder = _folder(job, step, check=False)
    if folder is not None:
        trainer.state.best_model_checkpoint = str(folder)
        _reshard(trainer.model)
        trainer._load_best_model()
        final = trainer.evaluate()
        if not math.isclose(final["eval_loss"], better[step], rel_tol=NEAR[job.plan.dtype]):
            raise BestModelWrong(
                f"{folder.name} was saved at a held-out loss of {better[step]:.5f}; loaded, it has "
                f"{final['eval_loss']:.5f}"
            )
    step = step or last_step
    trainer.state.best_metric, trainer.state.best_global_step = final["eval_loss"], step
    if job.is_main:
        best = {"step": step, "eval_loss": final["eval_loss"], "checkpoint": str(folder) if folder else None}
        job.events.write("best", **best, last_step=last_step, last_eval_loss=last_loss)
    return final


def _reshard(model: Any) -> None:
    """Shard the last FSDP2 group again: it stays gathered after a forward pass, and takes no weights so."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _folder(job: Job, step: int, check: bool = True) -> Path | None:
    """Return the checkpoint of a step: this run's, or of the run it goes on from; None when it is not good."""
    places = [job.paths.checkpoints]
    if job.orders.checkpoint is not None:
        places.append(Path(job.orders.checkpoint).parent)
    for place in places:
        folder = place / f"checkpoint-{step}"
        if folder.is_dir() and not (check and checkpoints.verify(folder)):
            return folder
    return None
