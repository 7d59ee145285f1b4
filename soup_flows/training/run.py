"""One rank's run, from the run directory to the saved and verified model."""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PrinterCallback, TrainerCallback, set_seed

from soup_flows.batch import Steps, steps
from soup_flows.data.prepare import PreparedData
from soup_flows.launch import rank
from soup_flows.launch.plan import LaunchPlan
from soup_flows.launch.rank import EventWriter
from soup_flows.paths import AttemptPaths, RunPaths, write_json
from soup_flows.resume import Orders
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.training import cpu
from soup_flows.training.arguments import training_arguments
from soup_flows.training.best import BestModel, final_evaluation, restore_best
from soup_flows.training.checkpointing import Checkpointer
from soup_flows.training.drills import Drill
from soup_flows.training.model import load_model, load_tokenizer, save_model, verify_saved
from soup_flows.training.reporter import ProofFailed, Reporter, peak_memory
from soup_flows.training.result import compare, free_training_state, live_logits, merge_adapter, write_facts
from soup_flows.training.rows import prepared, token_rows
from soup_flows.training.trainer import SoupTrainer
from soup_flows.training.universal import folder_to_resume

RESULT_EVERY_S = 0.2
"""Seconds between two looks for rank 0's result."""


@dataclass(frozen=True)
class Job:
    """Everything a rank was told."""

    spec: TrainingSpec
    plan: ShardingPlan
    launch: LaunchPlan
    paths: RunPaths
    attempt: AttemptPaths
    events: EventWriter
    drill: Drill
    orders: Orders

    @property
    def is_main(self) -> bool:
        """True on global rank 0."""
        return self.events.rank == 0


def train(run_dir: Path, attempt_dir: Path) -> None:
    """Train, evaluate, save and verify, as the files in `run_dir` say.

    Args:
        run_dir: the run directory with `spec.json`, `plan.json` and `launch.json`.
        attempt_dir: where this attempt's events, errors and result go.
    """
    # DeepSpeed calls collectives by names that torch 2.13 renamed: a warning per call, and nothing to do about it.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    transformers.utils.logging.disable_progress_bar()
    job = _read_job(run_dir, attempt_dir)
    if job.is_main:
        rank.report_warnings(job.events, ("transformers", "accelerate", "peft", "trl", "DeepSpeed"))
    _check_world(job.plan)
    job.events.write(
        "started",
        pid=os.getpid(),
        torch=torch.__version__,
        world_size=job.plan.world_size,
        from_step=0 if job.orders.weights_only else job.orders.step,
        set_aside=job.orders.set_aside,
    )
    rank.heartbeat(0, "load")
    data = prepared(job.spec, job.paths, job.is_main)
    settings = job.spec.training
    planned = steps(
        data.train_rows, job.plan.batch, settings.num_train_epochs, settings.max_steps, settings.warmup_ratio
    )
    job.events.write("data", train_rows=data.train_rows, eval_rows=data.eval_rows, **planned.model_dump())
    tokenizer = load_tokenizer(job.spec)
    trainer = build_trainer(job, planned, data, tokenizer)
    trainer.train(resume_from_checkpoint=folder_to_resume(job.orders, job.paths, job.is_main))
    if trainer.checkpointer.stopped:
        _write_stopped(job, trainer)
        return
    final = restore_best(job, trainer, final_evaluation(trainer)) if data.eval_rows else {}
    live = live_logits(trainer, tokenizer)
    rank.heartbeat(trainer.state.global_step, "save")
    job.drill.at_save()
    save_model(trainer, job.paths.model)
    job.events.write("memory", **peak_memory(job.plan))
    if job.is_main:
        _finish(job, trainer, planned, data, final, live)
    else:
        _await_result(job, trainer.state.global_step)


def _await_result(job: Job, step: int) -> None:
    """Stay until rank 0 has written the result: a rank that aborts at its exit ends all others at once.

    Rank 0 may take long, so this is no collective, which would time out. If it fails, the launcher's SIGTERM
    ends this rank.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank.heartbeat(step, "verify")
    while not job.attempt.result.exists():
        time.sleep(RESULT_EVERY_S)
    rank.heartbeat(step, "end")


def _finish(
    job: Job, trainer: Any, planned: Steps, data: PreparedData, final: dict[str, float], live: torch.Tensor
) -> None:
    """Check the saved model, merge and describe it, and write the result; rank 0 alone, without a collective."""
    folder, spec = job.paths.model, job.spec
    step = trainer.state.global_step
    saved = verify_saved(folder, spec.trains_adapters, step > 0)
    free_training_state()
    if spec.lora.merge_adapter:
        rank.heartbeat(step, "merge")
        job.events.write("merged", adapter=str(merge_adapter(spec, job.paths)))
        saved = verify_saved(folder, False, step > 0)
    rank.heartbeat(step, "verify")
    compared = compare(spec, job.plan, folder, live, trainer.processing_class)
    job.events.write("verified", **compared)
    eval_loss = final.get("eval_loss")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    numbers = {
        "rows": data.train_rows,
        "optimizer steps": step,
        "last training loss": f"{losses[-1]:.4f}" if losses else None,
        "held-out loss": None if eval_loss is None else f"{eval_loss:.4f} on {data.eval_rows} rows",
    }
    write_facts(folder, trainer, spec, job.plan, numbers)
    result = {
        "finished": True,
        "step": step,
        "total_steps": planned.total_steps,
        "eval_loss": eval_loss,
        "model": str(folder),
        "saved": saved,
    }
    write_json(job.attempt.result, result)
    job.events.write("finished", **result)
    rank.heartbeat(step, "end")


def _write_stopped(job: Job, trainer: SoupTrainer) -> None:
    """Say where the run was stopped, and what it can go on from; every rank gets here."""
    if job.is_main:
        step, saved = trainer.state.global_step, trainer.checkpointer.last_saved
        job.events.write("stopped", step=step, saved=saved == step, last_saved=saved)
    trainer.accelerator.wait_for_everyone()


def _read_job(run_dir: Path, attempt_dir: Path) -> Job:
    """Read what the flow wrote into the run directory."""
    paths = RunPaths(run_dir)
    attempt = AttemptPaths(attempt_dir)
    spec = TrainingSpec.model_validate_json(paths.spec.read_bytes())
    events = EventWriter(attempt.events, rank.rank_number())
    return Job(
        spec=spec,
        plan=ShardingPlan.model_validate_json(paths.plan.read_bytes()),
        launch=LaunchPlan.model_validate_json(paths.launch.read_bytes()),
        paths=paths,
        attempt=attempt,
        events=events,
        drill=Drill(spec.launcher.drill, events, run_dir / "drill-disk"),
        orders=Orders.model_validate_json(paths.orders.read_bytes()),
    )


def _check_world(plan: ShardingPlan) -> None:
    """Stop at once when another number of ranks was started than planned.

    A single rank leaves torch elastic's variables behind, so that nothing wraps the model.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != plan.world_size:
        raise ProofFailed(f"{world_size} rank(s) were started, {plan.world_size} were planned")
    if plan.engine == "single":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


def build_trainer(job: Job, planned: Steps, data: PreparedData, tokenizer: Any) -> Any:
    """Build arguments, then the model, then the trainer: ZeRO-3 needs them in this order."""
    plan, on_cpu = job.plan, job.plan.device == "cpu"
    if plan.engine == "deepspeed" and on_cpu:
        cpu.prepare_deepspeed()
    arguments = training_arguments(
        job.spec,
        plan,
        planned,
        str(job.paths.checkpoints),
        job.launch.config_path,
        evaluate=data.eval_rows > 0,
        evaluate_first=data.eval_rows > 0 and job.orders.checkpoint is None,
    )
    if plan.engine == "fsdp" and on_cpu:
        cpu.force_fsdp(arguments)
    set_seed(job.spec.training.seed)
    weights = job.orders.checkpoint if job.orders.weights_only else None
    reporter, best = Reporter(job), BestModel(job)
    checkpointer = Checkpointer(job, job.orders, planned.total_steps, best)
    callbacks: list[TrainerCallback] = [reporter, checkpointer, best]
    model = load_model(job.spec, plan, weights)
    if job.spec.compares_answers:
        from soup_flows.training.preference import preference_trainer

        trainer: Any = preference_trainer(job.spec, data, arguments, model, tokenizer, callbacks, weights)
    else:
        train_rows, eval_rows = token_rows(job.spec, data)
        trainer = SoupTrainer(
            model=model,
            args=arguments,
            batch=plan.batch,
            eval_tokens=plan.batch.per_device_train_batch_size * job.spec.data.max_length,
            packing=job.spec.data.packing,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
    trainer.remove_callback(PrinterCallback)  # Reporter prints the same numbers, once
    if plan.strategy == "full_offload" and on_cpu:
        cpu.unpin_fsdp_offload(trainer)
    job.events.write("model", parameters=sum(p.numel() for p in trainer.model.parameters()))
    reporter.trainer = checkpointer.trainer = trainer
    trainer.checkpointer = checkpointer
    return trainer
