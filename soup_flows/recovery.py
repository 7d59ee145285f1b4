"""What happens after a failed attempt: whether there is another, when, and with which plan."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from soup_flows.batch import largest_divisor
from soup_flows.checkpoints import list_checkpoints
from soup_flows.errors import FailureClass
from soup_flows.launch import proc
from soup_flows.ledger import Attempt, Change, count
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from soup_flows.resume import Orders, data_hash, work_hash
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import RecoverySettings, TrainingSpec
from soup_flows.units import gib

LONGEST_WAIT_S = 3600.0
LOWER_RATE = 0.5
"""Factor on the learning rate after a loss that was not finite."""

POLICY: dict[FailureClass, str] = {
    "preempted": "the machine was taken away, nothing is wrong with the run",
    "node_lost": "the machine went away, nothing is wrong with the run",
    "nccl_timeout": "links and switches recover",
    "rank_killed": "something outside the run ended it",
    "stalled": "a stuck collective or file system often works the next time",
    "unknown": "once: without a known cause it may be the run itself",
}
"""Classes that are retried as they are, and why; `unknown` once, the others `recovery.max_retries` times."""

MORE_SHARDING = {"ddp": "zero2", "zero1": "zero2", "zero2": "zero3", "zero2_offload": "zero3_offload",
                 "zero3": "zero3_offload", "shard_grad": "full_shard", "hybrid_shard": "full_shard",
                 "full_shard": "full_offload"}  # fmt: skip
"""The next strategy that needs less memory on a GPU."""


Replan = Callable[[Change], ShardingPlan | None]


class Decision(BaseModel):
    """What to do after an attempt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    retry: bool
    reason: str
    wait_s: float = 0.0
    change: Change = Change()


def decide(
    settings: RecoverySettings, plan: ShardingPlan, rows: Sequence[Attempt], replan: Replan | None = None
) -> Decision:
    """Return what follows the last of `rows`.

    Args:
        settings: the policy.
        plan: what the last attempt ran.
        rows: the ledger, at least one attempt.
        replan: returns the plan for a change, predicted with what the last attempt measured; None if there is
            none. Without it every smaller plan is tried.
    """
    last = rows[-1]
    cause = last.failure_class or "unknown"
    times, change = count(rows, cause), last.change
    if settings.max_retries == 0:
        return Decision(retry=False, reason="recovery.max_retries is 0")
    if cause == "cuda_oom":
        return _smaller(settings, plan, last, replan)
    if cause == "nan_loss":
        if settings.on_nan == "stop":
            return Decision(retry=False, reason="recovery.on_nan is stop")
        change = _go_back(settings, rows)
    elif cause not in POLICY:
        return Decision(retry=False, reason=f"{cause} would come back")
    most = 1 if cause == "unknown" else settings.max_retries
    if times > most:
        return Decision(retry=False, reason=f"{cause} for the {times}. time, {most} retries are allowed")
    wait_s = min(LONGEST_WAIT_S, settings.backoff_s * 2 ** (times - 1))
    why = POLICY.get(cause, change.path[-1] if change.path else "")
    return Decision(
        retry=True, reason=f"{cause}, retry {times} of {most}: {why}", wait_s=wait_s, change=change
    )


def _smaller(
    settings: RecoverySettings, plan: ShardingPlan, last: Attempt, replan: Replan | None
) -> Decision:
    """Return the next plan that needs less GPU memory; those that keep the result exactly come first.

    Each is smaller than the one before, so the list ends by itself and is not bounded by `max_retries`. What
    cannot fit, by a prediction that was corrected with the measured need, is not tried.
    """
    if settings.on_oom == "stop":
        return Decision(retry=False, reason="recovery.on_oom is stop")
    change, short = _step_down(settings, plan, last.change, last.good_step), ""
    while change is not None and replan is not None:
        made = replan(change)
        if made is None or not (short := _shortage(made)):
            break
        path = (*change.path[:-1], f"{change.path[-1]}; not tried, {short}")
        smaller = change.model_copy(update={"path": path})
        change = _step_down(settings, made, smaller, last.good_step)
    if change is None:
        left = f"no smaller plan is left that recovery.on_oom allows{f'; the last {short}' if short else ''}"
        return Decision(retry=False, reason=left)
    return Decision(retry=True, reason=f"cuda_oom: {change.path[-1]}", change=change)


def _shortage(plan: ShardingPlan) -> str:
    """Say why a plan cannot fit, even at the lower end of its corrected prediction; nothing if it may."""
    if plan.memory is None or plan.room is None or plan.correction is None:
        return ""
    least = plan.memory.low_bytes + plan.memory.context_bytes
    if least <= plan.room.device:
        return ""
    return f"it needs at least {gib(least)} of {gib(plan.room.device)} by what was measured"


def _step_down(
    settings: RecoverySettings, plan: ShardingPlan, change: Change, good_step: int
) -> Change | None:
    """Return the change for the next smaller plan, or None."""
    batch = plan.batch
    micro = batch.per_device_train_batch_size
    share = micro * batch.gradient_accumulation_steps
    fixed = any(
        isinstance(plan.config.get(key), int)
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ) and not plan.config_source.startswith("preset ")  # fmt: skip
    if micro > 1 and not fixed:
        fewer = largest_divisor(share, micro // 2)
        return change.then(
            f"micro batch {micro} -> {fewer}, accumulation {share // micro} -> {share // fewer}; "
            "the same rows per step, so the result is kept",
            per_device_train_batch_size=fewer,
        )
    if not (change.gradient_checkpointing or plan.gradient_checkpointing):
        return change.then(
            "activations are recomputed (gradient checkpointing); the result is kept",
            gradient_checkpointing=True,
        )
    if settings.on_oom != "shard_more" or plan.strategy not in MORE_SHARDING or fixed:
        return None
    more, cost = MORE_SHARDING[plan.strategy], "its optimizer state cannot be carried over"
    if good_step:
        cost += f", so it goes on from the weights of step {good_step} with a new optimizer and schedule"
    return change.then(f"{plan.strategy} -> {more}: {cost}", strategy=more)


def _go_back(settings: RecoverySettings, rows: Sequence[Attempt]) -> Change:
    """Return to a checkpoint before the loss was lost, with a lower rate or without the rows of that step."""
    last = rows[-1]
    change, bad = last.change, max(_bad_steps(last), default=last.last_step)
    if any(r.failure_class == "nan_loss" and r.from_step == last.good_step for r in rows) and last.good_step:
        change = change.model_copy(update={"max_step": last.good_step - 1})
    if settings.on_nan == "skip_batch":
        skipped = tuple(sorted({*change.skip_steps, *(_bad_steps(last) or {bad})}))
        return change.then(f"the rows of optimizer step {bad} are left out", skip_steps=skipped)
    scale = change.learning_rate_scale * LOWER_RATE
    return change.then(f"learning rate x {scale:g}", learning_rate_scale=scale)


def _bad_steps(row: Attempt) -> set[int]:
    """Return the steps whose loss was not finite, from the words of the rank that saw it."""
    found = re.search(r"not finite in steps? (\d+)(?: to (\d+))?", row.cause)
    return set(range(int(found[1]), int(found[2] or found[1]) + 1)) if found else set()


def move_weights(paths: RunPaths, decision: Decision, total_steps: int | None) -> Decision:
    """Set the newest checkpoint apart as a source of weights, before an attempt under another strategy.

    Under its old name it would be taken for one to resume from. Call it once for each change of strategy.

    Args:
        paths: the run's files.
        total_steps: optimizer steps planned for the run.
        decision: the decision that names the new strategy.

    Returns:
        The decision with the source of weights and the steps that are left.
    """
    folders = list_checkpoints(paths.checkpoints)
    if not folders:
        return decision
    target = folders[0].with_name(f"weights-{folders[0].name.removeprefix('checkpoint-')}")
    step = int(target.name.removeprefix("weights-"))
    for folder in folders[1:]:
        folder.rename(folder.with_name(f"before-{folder.name}"))
    folders[0].rename(target)
    left = None if total_steps is None else max(1, total_steps - step)
    change = decision.change.model_copy(update={"weights": str(target), "max_steps": left})
    return decision.model_copy(update={"change": change})


# -- the beginning of a flow run -------------------------------------------------------------------


def begin(spec: TrainingSpec, paths: RunPaths) -> tuple[TrainingSpec, TrainReport | None]:
    """Look at what this flow run, or another one, did already; an old request to stop is forgotten.

    Returns:
        The spec, which resumes an unfinished equal run where `recovery.reuse` allows it, and the report of this
        run or of an equal one when there is nothing left to do.
    """
    paths.stop_request.unlink(missing_ok=True)
    with contextlib.suppress(OSError, ValueError):
        own = TrainReport.load(paths.root)
        if own.state == "completed" and own.model and Path(own.model).is_dir():
            return spec, own
    finished, unfinished = find_equal(spec, paths.root.name)
    if unfinished is not None and spec.recovery.resume == "auto" and not paths.attempt(1).root.exists():
        recovery = spec.recovery.model_copy(update={"resume": unfinished})
        spec = spec.model_copy(update={"recovery": recovery})
    return spec, finished


# -- the same work twice ---------------------------------------------------------------------------


def find_equal(spec: TrainingSpec, run_id: str) -> tuple[TrainReport | None, str | None]:
    """Look for a run in the same output folder that did, or began, the same work.

    Returns:
        The newest finished one's report, or None; and the id of the newest unfinished one that has a checkpoint
        and no process here, or None.
    """
    if spec.recovery.reuse == "never":
        return None, None
    wanted = work_hash(spec, data_hash(spec))
    finished: list[tuple[float, TrainReport]] = []
    begun: list[tuple[float, str]] = []
    for root in (RunPaths.of(spec.output_dir, run_id).root.parent).glob("*"):
        paths = RunPaths(root)
        if root.name == run_id or _work_of(paths) != wanted:
            continue
        try:
            report = TrainReport.load(root)
        except (OSError, ValueError):
            report = None
        if report is not None and report.state == "completed":
            if report.model and Path(report.model).is_dir():
                finished.append((paths.report.stat().st_mtime, report))
        elif list_checkpoints(paths.checkpoints) and not proc.marked(root.name):
            begun.append((root.stat().st_mtime, root.name))
    if finished:
        return max(finished, key=lambda found: found[0])[1], None
    unfinished = max(begun)[1] if begun and spec.recovery.reuse == "any" else None
    return None, unfinished


def _work_of(paths: RunPaths) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        return Orders.model_validate_json(paths.orders.read_bytes()).work_hash
    return None


def wait(seconds: float, paths: RunPaths) -> str | None:
    """Wait before a retry; return why it should not come after all, if somebody asked to stop."""
    end = time.monotonic() + seconds
    while not paths.stop_request.exists():
        left = end - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(1.0, left))
    return "stopped on request before the retry"
