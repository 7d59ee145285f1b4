"""Saves checkpoints on all ranks together: whole or not at all, read back, and never in the way of training."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import TrainerCallback

from soup_flows import checkpoints
from soup_flows.launch import layout, rank
from soup_flows.manifest import Manifest, library_versions, read_manifest
from soup_flows.resume import Orders, digest
from soup_flows.resume_fit import identity
from soup_flows.training import universal
from soup_flows.training.best import BestModel
from soup_flows.training.saving import recording_failed_writes
from soup_flows.training.stopping import StopListener

if TYPE_CHECKING:
    from soup_flows.training.run import Job

BYTES_PER_TRAINED_PARAMETER = 16
"""Upper bound of a checkpoint with AdamW in bytes, before one was measured: fp32 weights and two moments are
12, and ZeRO and FSDP keep the weights twice."""
SPARE_BYTES = 64 << 20
SLOW_DISK_BYTES_PER_S = 200e6
"""Speed assumed for the first save of a run."""
COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""The others wait this long for the rank that hashes a checkpoint."""
CHECKPOINTS_A_RUN = 10
NO, SAVE, LEAVE = 0, 1, 2


class Checkpointer(TrainerCallback):
    """Decides when to save and when to stop, makes all ranks agree on it, and names finished checkpoints.

    Args:
        job: what the rank was told.
        orders: where this attempt starts.
        total_steps: optimizer steps of the whole run.
        best: says which checkpoint is not rotated away.
    """

    def __init__(self, job: Job, orders: Orders, total_steps: int, best: BestModel) -> None:
        self.job, self.orders, self.total_steps, self.best = job, orders, total_steps, best
        asked = job.spec.recovery.save_steps
        self.every = -(-total_steps // CHECKPOINTS_A_RUN) if asked is None else asked
        self.staging = job.paths.checkpoints / checkpoints.STAGING
        self.listener = StopListener(layout.stopping(job.attempt.root))
        self.trainer: Any = None
        self.group: Any = None
        self.saving = False
        self.errors: list[str] = []
        self.last_saved: int | None = None if orders.weights_only or not orders.checkpoint else orders.step
        self.stopped: int = NO
        self.last: dict[str, float] = {}
        self.finite = True
        """Whether the last gradient was: after one that was not, the weights may hold NaN."""
        self.saved_bytes = 0
        self.save_s = 0.0
        self.before: Manifest | None = None
        if orders.checkpoint is not None:
            self.before = read_manifest(Path(orders.checkpoint))
            self.saved_bytes, self.save_s = self.before.total_bytes, self.before.save_seconds

    # -- when --------------------------------------------------------------------------------------

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Everything is loaded by now: begin to listen, and change the learning rate if that was ordered."""
        if self.job.plan.world_size > 1:
            self.group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        before = self.before.learning_rate_scale if self.before and not self.orders.weights_only else 1.0
        if self.orders.learning_rate_scale != before:
            _scale_learning_rate(self.trainer, self.orders.learning_rate_scale / before)
        self.listener.needed_s = self.predicted_s()
        self.listener.start()
        if self.last_saved is not None and state.global_step != self.orders.step:
            raise RuntimeError(
                f"resumed at step {state.global_step}, the checkpoint is of {self.orders.step}"
            )

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree on stopping and saving; the last step is saved as the final model instead."""
        wish = self.agree_on(self._wish())
        if state.global_step >= state.max_steps:
            return
        if wish != NO:
            self.stopped = wish
            control.should_training_stop = True
        if wish == SAVE or (wish == NO and self.every and state.global_step % self.every == 0):
            control.should_save = control.should_log = True
            self.listener.saving = True

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Keep the last numbers; those of the first step after a resume are its proof."""
        if "loss" not in logs:
            return
        self.finite = math.isfinite(logs.get("grad_norm", 0.0))
        self.last = {k: logs[k] for k in ("loss", "learning_rate") if isinstance(logs.get(k), int | float)}
        if self.before is not None and self.job.is_main:
            shutil.rmtree(self.job.paths.checkpoints / universal.FOLDER, ignore_errors=True)
            self.job.events.write(
                "resumed",
                step=state.global_step,
                from_step=self.before.step,
                checkpoint=self.orders.checkpoint,
                weights_only=self.orders.weights_only,
                loss=self.last.get("loss"),
                loss_before=self.before.loss,
                learning_rate=self.last.get("learning_rate"),
                learning_rate_before=self.before.learning_rate,
            )
        self.before = None

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Nothing can be saved from here on but the final model."""
        self.listener.saving = self.stopped != NO
        self.listener.end()

    def _wish(self) -> int:
        """Return what this rank wants: nothing, to save and stop, or to stop without saving."""
        if self.listener.deadline is not None:
            self.listener.needed_s = self.predicted_s()
            fits = time.time() + self.predicted_s() < self.listener.deadline
            return SAVE if fits and self.every else LEAVE
        if not self.job.is_main:
            return NO
        with contextlib.suppress(OSError, ValueError):
            return SAVE if json.loads(self.job.paths.stop_request.read_text()).get("save") else NO
        return NO

    def predicted_s(self) -> float:
        """Return how long the next save takes, in seconds."""
        return 1.0 + (1.5 * self.save_s if self.save_s else self._needed_bytes() / SLOW_DISK_BYTES_PER_S)

    def agree_on(self, value: int) -> int:
        """Return the largest value of all ranks; a collective call."""
        if self.group is None:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return int(tensor.item())

    # -- save --------------------------------------------------------------------------------------

    def save(self, write: Callable[[], None]) -> bool:
        """Write a checkpoint with `write` on all ranks; a failure is an event and training goes on.

        Returns:
            Whether the checkpoint has its name now.

        Raises:
            SaveLied: if what is on disk is not what was trained.
        """
        step, begun = self.trainer.state.global_step, time.monotonic()
        rank.heartbeat(step, "save")
        self.listener.saving = True
        self.errors = []
        folder = self.staging / f"checkpoint-{step}"
        self._attempt(self._prepare)
        if self._all_good():
            self.saving = True
            with recording_failed_writes(self.errors):
                self._attempt(write)
            self.saving = False
        if self._all_good() and self.job.is_main:
            self._attempt(lambda: self._name(folder, step, begun))
        good = self._all_good()
        self.listener.saving = self.stopped != NO
        if good:
            self.last_saved = step
            self.save_s = time.monotonic() - begun
            self.listener.needed_s = self.predicted_s()
        elif self.errors:
            self.job.events.write("save_failed", step=step, reason="; ".join(self.errors))
            print(f"step {step}: not saved: {'; '.join(self.errors)}", flush=True)  # noqa: T201 (rank's log)
        if not good and self.job.is_main:
            shutil.rmtree(self.staging, ignore_errors=True)
        rank.heartbeat(step)
        return good

    def _attempt(self, action: Callable[[], None]) -> None:
        """Run `action`; a disk that refuses is recorded, everything else is raised."""
        try:
            action()
        except (OSError, SafetensorError, ValueError) as error:
            self.errors.append(str(error))

    def _all_good(self) -> bool:
        return self.agree_on(int(bool(self.errors))) == 0

    def _prepare(self) -> None:
        """Make an empty staging folder where there is room; rank 0 does."""
        if not self.job.is_main:
            return
        if not self.finite:
            raise ValueError("the gradient of this step is not finite")
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir(parents=True, mode=0o700)
        free, needed = shutil.disk_usage(self.staging).free, self._needed_bytes()
        if free < needed:
            raise OSError(
                f"{free / 2**30:.2f} GiB are free in {self.staging.parent}, a checkpoint needs "
                f"{needed / 2**30:.2f} GiB"
            )

    def _needed_bytes(self) -> int:
        """Return the bytes of the next checkpoint: as many as the last, or an upper bound."""
        if self.saved_bytes:
            return int(1.05 * self.saved_bytes) + (1 << 20)
        trained = sum(
            getattr(p, "ds_numel", p.numel()) for p in self.trainer.model.parameters() if p.requires_grad
        )
        return trained * BYTES_PER_TRAINED_PARAMETER + SPARE_BYTES

    def _name(self, folder: Path, step: int, begun: float) -> None:
        """Seal the folder that all ranks have written and give it its name; rank 0 does."""
        (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle that nobody needs
        spec, plan = self.job.spec, self.job.plan
        settings = identity(spec)
        manifest = Manifest(
            run_id=self.job.launch.run_id,
            step=step,
            total_steps=self.total_steps,
            strategy=plan.strategy,
            engine=plan.engine,
            world_size=plan.world_size,
            dtype=plan.dtype,
            adapters=spec.trains_adapters,
            identity=settings,
            spec_hash=digest(settings),
            data_hash=self.orders.data_hash,
            learning_rate_scale=self.orders.learning_rate_scale,
            loss=self.last.get("loss"),
            learning_rate=self.last.get("learning_rate"),
            save_seconds=time.monotonic() - begun,
            saved_at=time.time(),
            versions=library_versions(),
        )
        manifest = checkpoints.seal(folder, manifest)
        final = self.job.paths.checkpoints / folder.name
        if final.exists():
            checkpoints.set_aside(final, ["saved again at the same step"])
        folder.rename(final)
        checkpoints.sync(final.parent)
        self.saved_bytes = manifest.total_bytes
        keep = self.job.spec.recovery.save_total_limit
        spared = self.best.spared(self.trainer.state)
        removed = checkpoints.rotate(final.parent, keep, known_good=(final.name,), spared=spared)
        self.job.events.write(
            "checkpoint",
            step=step,
            path=str(final),
            bytes=manifest.total_bytes,
            seconds=time.monotonic() - begun,
            removed=removed,
        )


def _scale_learning_rate(trainer: Any, factor: float) -> None:
    """Multiply the learning rate of optimizer and schedule; a loaded state would ignore the arguments."""
    scheduler = trainer.lr_scheduler
    while not hasattr(scheduler, "base_lrs"):
        scheduler = scheduler.scheduler
    scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
    scheduler._last_lr = [rate * factor for rate in scheduler._last_lr]
    groups = {id(g): g for o in (scheduler.optimizer, trainer.optimizer) for g in o.param_groups}
    for group in groups.values():
        for key in {"lr", "initial_lr"} & set(group):
            group[key] *= factor
