"""The six tasks. Each works in any flow, and through `.fn` without Prefect.

They are synchronous, and have effects (or read the machine), so results are never taken from a cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect import runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from soup_flows.artifacts import save_data_report
from soup_flows.attempt import CLEANING_S, free_now, run_attempt
from soup_flows.attempt_report import failure_of, report_of, report_of_stop
from soup_flows.attempts import record
from soup_flows.block_use import checkpoint_store, credentials
from soup_flows.data.prepare import PreparedData, prepare_data
from soup_flows.errors import ClusterSilent, Problem, Refused, TrainingFailed
from soup_flows.hardware import Hardware, detect
from soup_flows.hardware.recorded import read_recorded
from soup_flows.launch.plan import LaunchPlan
from soup_flows.ledger import Change, read_ledger
from soup_flows.live import emit_end
from soup_flows.measured import recall
from soup_flows.own_run import own_run_watch
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from soup_flows.run_files import present_attempt, write_run
from soup_flows.run_lock import run_lock
from soup_flows.sharding import ShardingPlan, make_plan, read_model_config
from soup_flows.spec import TrainingSpec
from soup_flows.stop import asked_to_stop, stop
from soup_flows.validation import apply_fixes, count_rows, validate, with_others


@task(name="detect hardware", cache_policy=NO_CACHE)
def detect_hardware(
    device: str = "auto", paths: Sequence[str] = (), recorded: str | None = None, field: str = "--hardware"
) -> Hardware:
    """Read what this machine has, without touching a GPU's memory.

    Args:
        device: `auto`, `cuda` or `cpu`.
        paths: folders whose free disk space matters.
        recorded: JSON of `soup-flows doctor --json` of the machine that trains, where that is not this one.
        field: the setting that names the record, for the message.

    Raises:
        Refused: for `device="cuda"` on a machine without a usable GPU, with the reason; for a record that
            cannot be read.
    """
    hardware = (
        detect(device, paths)  # type: ignore[arg-type]
        if recorded is None
        else read_recorded(recorded, field)
    )
    gpus = ", ".join(f"{gpu.name} ({gpu.memory_total_bytes / 2**30:.0f} GiB)" for gpu in hardware.gpus)
    _logger().info(
        "Hardware: %s; %d CPU cores; %.1f GiB of host memory available",
        gpus or "no GPU",
        hardware.cpu_cores,
        hardware.host_memory.available_bytes / 2**30,
    )
    return hardware


@task(name="prepare dataset", cache_policy=NO_CACHE)
def prepare_dataset(spec: TrainingSpec) -> PreparedData:
    """Read, check and tokenise the data once; unchanged data is not tokenised again.

    The data report is kept as the artifact `soup-train-data`.

    Raises:
        Refused: if the data cannot be read, or no row can be trained.
    """
    try:
        read_model_config(
            spec.model
        )  # a folder that is no model is refused in better words than a tokenizer's
        with credentials(spec):
            data = prepare_data(spec)
    except Refused as refused:
        raise with_others(refused, spec) from None
    report = data.train.report
    _logger().info(
        "Data: %d rows to train, %d held out; %d rows dropped; %s tokens an epoch, %s of them trained",
        data.train_rows,
        data.eval_rows,
        report.rows_dropped,
        report.total_tokens,
        report.trained_tokens,
    )
    save_data_report(report)
    return data


def plan_or_explain(
    spec: TrainingSpec, hardware: Hardware, rows: int | None = None, kept: ShardingPlan | None = None
) -> ShardingPlan:
    """Return the plan; where there is none, say everything else that is wrong with the spec too."""
    try:
        correction = recall(spec, hardware)
        return make_plan(spec, hardware, rows, spec.nodes, kept=kept, correction=correction)
    except Refused as refused:
        raise with_others(refused, spec) from None


@task(name="resolve sharding config", cache_policy=NO_CACHE)
def resolve_sharding_config(
    spec: TrainingSpec,
    hardware: Hardware,
    data: PreparedData | None = None,
    kept: ShardingPlan | None = None,
) -> ShardingPlan:
    """Turn what was asked into what every rank will run.

    Args:
        spec: what was asked.
        hardware: the machine.
        data: what `prepare dataset` returned; without it the rows are counted without a tokenizer.
        kept: the plan of the attempt before; a strategy that was chosen then is kept.

    Raises:
        Refused: with every field that cannot be planned, and the nearest value that can.
    """
    hardware = free_now(spec, hardware)
    plan = plan_or_explain(spec, hardware, count_rows(spec) if data is None else data.train_rows, kept)
    plan, mended = apply_fixes(spec, hardware, plan)
    plan = plan.model_copy(update={"notes": (*plan.notes, *mended)})
    batch = plan.batch
    _logger().info(
        "Plan: %s on %d rank(s), %s; %d rows per optimizer step = %d x %d passes x %d ranks; %s",
        plan.strategy,
        plan.world_size,
        plan.dtype,
        batch.global_batch_size,
        batch.per_device_train_batch_size,
        batch.gradient_accumulation_steps,
        batch.world_size,
        f"{plan.steps.total_steps} steps" if plan.steps else "steps unknown before the launch",
    )
    _logger().info("Why %s: %s", plan.strategy, plan.reason)
    for note in plan.notes:
        _logger().info("Note: %s", note)
    return plan


@task(name="validate strategy", cache_policy=NO_CACHE)
def validate_strategy(spec: TrainingSpec, hardware: Hardware, plan: ShardingPlan) -> list[Problem]:
    """Check the plan against everything that is known to fail, do nothing or train wrong.

    Returns:
        Warnings and notes.

    Raises:
        Refused: with all problems at once, if one of them is an error.
    """
    with credentials(spec):
        problems = validate(spec, hardware, plan, deep=spec.validation.deep)
    for problem in problems:
        _logger().log(logging.INFO if problem.severity == "note" else logging.WARNING, "%s", problem)
    if any(problem.severity == "error" for problem in problems):
        raise Refused(problems)
    return problems


@task(name="write temp config", cache_policy=NO_CACHE)
def write_temp_config(
    spec: TrainingSpec,
    hardware: Hardware,
    plan: ShardingPlan,
    run_id: str | None = None,
    change: Change | None = None,
    data: PreparedData | None = None,
) -> LaunchPlan:
    """Write the run directory and the config file that the ranks read, and choose the checkpoint to start from.

    The temporary config has mode 0600 and is removed when the attempt ends; a copy stays in the run directory.

    Args:
        spec: what was asked.
        hardware: the machine.
        plan: the resolved plan.
        run_id: name of the run directory; the flow run's id when empty, else a new one.
        change: how a retry differs from what was asked; `spec` and `plan` have it already.
        data: what `prepare dataset` returned; without it the first rank prepares the data.

    Raises:
        Refused: if the checkpoint to resume from is not there, broken, or does not fit; if another process is
            running this run, or its directory cannot be written.
    """
    paths = RunPaths.of(spec.output_dir, run_id or runtime.flow_run.id or str(uuid4()))
    with run_lock(paths, spec.launcher.stop_budget_s + CLEANING_S):
        launch, orders = write_run(spec, hardware, plan, paths, change, data)
    _logger().info("Run directory: %s", paths.root)
    for line in orders.set_aside:
        _logger().warning("Checkpoint set aside: %s", line)
    if orders.checkpoint:
        what = "Weights alone are taken from" if orders.weights_only else "Resuming"
        _logger().info("%s %s (step %d)", what, orders.checkpoint, orders.step)
    return launch


@task(name="launch distributed train", cache_policy=NO_CACHE)
def launch_distributed_train(
    launch: LaunchPlan, problems: Sequence[Problem] = (), change: Change | None = None
) -> TrainReport:
    """Start the ranks, watch them, and end with nothing left behind, however this ends.

    Args:
        launch: what `write temp config` returned.
        problems: the warnings of `validate strategy`, kept in the report.
        change: how this attempt differs from what was asked, kept in the ledger.

    Returns:
        The report; it is in the run directory as `report.json` too, also when this raises.

    Raises:
        TrainingFailed: with the failure class, the cause in one sentence, advice and the run directory.
    """
    paths = RunPaths(Path(launch.run_dir))
    logger = _logger()
    plan = ShardingPlan.model_validate_json(paths.plan.read_bytes())
    base: dict[str, Any] = {
        "run_id": launch.run_id,
        "run_dir": launch.run_dir,
        "plan": plan,
        "problems": tuple(problems),
        "attempts": launch.attempt,
    }
    begun, clock = time.time(), time.monotonic()
    try:
        spec = TrainingSpec.model_validate_json(paths.spec.read_bytes())
        with (
            own_run_watch(on_pause=lambda: stop(paths.root, save=True)) as server_says,
            credentials(spec),
        ):
            outcome = run_attempt(
                launch, logger, lambda: server_says() or asked_to_stop(paths), checkpoint_store(spec)
            )
    except BaseException as stopped:
        number = present_attempt(launch)
        found = base | {"attempts": number, "seconds": time.monotonic() - clock}
        report = report_of_stop(paths, number, stopped, found)
        if isinstance(stopped, ClusterSilent):  # the attempt may go on: its line comes when it has ended
            report = report.model_copy(update={"ledger": read_ledger(paths.attempts)})
            report.save()
        else:
            report = record(paths, number, report, begun, change)
        emit_end(report)
        if isinstance(stopped, TrainingFailed):
            raise failure_of(report) from None
        raise
    number = outcome.attempt
    report = report_of(paths, number, outcome, base | {"attempts": number})
    report = record(paths, number, report, begun, change)
    emit_end(report)
    if report.state != "completed":
        raise failure_of(report)
    logger.info("Model: %s", report.model)
    return report


def _logger() -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    """Return the run's logger, or the module's outside a run."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger(__name__)
