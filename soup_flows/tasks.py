"""The five tasks. Each works in any flow, and through `.fn` without Prefect.

They are synchronous, and have effects (or read the machine), so results are never taken from a cache.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from prefect import runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

from soup_flows.deepspeed import write_deepspeed_config
from soup_flows.errors import Problem, Refused, TrainingFailed
from soup_flows.hardware import Hardware, detect
from soup_flows.launch.outcome import classify
from soup_flows.launch.plan import LaunchPlan, build_launch_plan
from soup_flows.launch.run import Outcome, run
from soup_flows.paths import AttemptPaths, RunPaths, write_atomic, write_json
from soup_flows.report import RunState, TrainReport, read_attempt
from soup_flows.sharding import ShardingPlan, make_plan
from soup_flows.spec import TrainingSpec
from soup_flows.validation import count_rows, validate

WATCH_EVERY_S = 10.0
"""Seconds between two looks at the run's own state on the server."""


@task(name="detect hardware", cache_policy=NO_CACHE)
def detect_hardware(device: str = "auto", paths: Sequence[str] = ()) -> Hardware:
    """Read what this machine has, without touching a GPU's memory.

    Args:
        device: `auto`, `cuda` or `cpu`.
        paths: folders whose free disk space matters.

    Raises:
        Refused: for `device="cuda"` on a machine without a usable GPU, with the reason.
    """
    hardware = detect(device, paths)  # type: ignore[arg-type]
    gpus = ", ".join(f"{gpu.name} ({gpu.memory_total_bytes / 2**30:.0f} GiB)" for gpu in hardware.gpus)
    _logger().info(
        "Hardware: %s; %d CPU cores; %.1f GiB of host memory available",
        gpus or "no GPU",
        hardware.cpu_cores,
        hardware.host_memory.available_bytes / 2**30,
    )
    return hardware


@task(name="resolve sharding config", cache_policy=NO_CACHE)
def resolve_sharding_config(spec: TrainingSpec, hardware: Hardware) -> ShardingPlan:
    """Turn what was asked into what every rank will run.

    Raises:
        Refused: with every field that cannot be planned, and the nearest value that can.
    """
    plan = make_plan(spec, hardware, count_rows(spec))
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
    problems = validate(spec, hardware, plan)
    for problem in problems:
        _logger().log(logging.INFO if problem.severity == "note" else logging.WARNING, "%s", problem)
    if any(problem.severity == "error" for problem in problems):
        raise Refused(problems)
    return problems


@task(name="write temp config", cache_policy=NO_CACHE)
def write_temp_config(
    spec: TrainingSpec, hardware: Hardware, plan: ShardingPlan, run_id: str | None = None
) -> LaunchPlan:
    """Write the run directory and the config file that the ranks read.

    The temporary config has mode 0600 and is removed when the attempt ends; a copy stays in the run directory.

    Args:
        spec: what was asked.
        hardware: the machine.
        plan: the resolved plan.
        run_id: name of the run directory; the flow run's id when empty, else a new one.
    """
    paths = RunPaths.of(spec.output_dir, run_id or runtime.flow_run.id or str(uuid4())).create()
    attempt = 1
    while paths.attempt(attempt).root.exists():
        attempt += 1
    paths.temp.mkdir(mode=0o700, exist_ok=True)
    config_path = _write_config(spec, plan, paths)
    write_atomic(paths.spec, spec.model_dump_json(indent=2))
    write_atomic(paths.hardware, hardware.model_dump_json(indent=2))
    write_atomic(paths.plan, plan.model_dump_json(indent=2))
    launch = build_launch_plan(
        paths=paths,
        run_id=paths.root.name,
        attempt=attempt,
        nproc_per_node=plan.ranks_per_node,
        device=plan.device,
        config_path=config_path,
        omp_num_threads=spec.launcher.omp_num_threads or max(1, hardware.cpu_cores // plan.ranks_per_node),
        stop_budget_s=spec.launcher.stop_budget_s,
        timeout_s=spec.launcher.timeout_min * 60 if spec.launcher.timeout_min else None,
        cuda_visible_devices=_devices(hardware, plan),
    )
    write_atomic(paths.launch, launch.model_dump_json(indent=2))
    _logger().info("Run directory: %s", paths.root)
    return launch


def _write_config(spec: TrainingSpec, plan: ShardingPlan, paths: RunPaths) -> str | None:
    """Write the temporary config and its kept copy; a user's own JSON is copied byte for byte."""
    if not plan.config:
        return None
    if spec.deepspeed_config:
        content = Path(spec.deepspeed_config).expanduser().read_bytes()
        write_atomic(paths.config(plan.engine), content)
        return str(write_atomic(paths.temp / "deepspeed_config.json", content))
    write_json(paths.config(plan.engine), plan.config)
    return write_deepspeed_config(plan.config, paths.temp)


def _devices(hardware: Hardware, plan: ShardingPlan) -> str | None:
    """Name the GPUs of the run by UUID, so that `gpus=1` on a box with eight sees one."""
    if plan.device == "cpu":
        return None
    return ",".join(gpu.uuid for gpu in hardware.gpus[: plan.ranks_per_node])


@task(name="launch distributed train", cache_policy=NO_CACHE)
def launch_distributed_train(launch: LaunchPlan, problems: Sequence[Problem] = ()) -> TrainReport:
    """Start the ranks, watch them, and end with nothing left behind, however this ends.

    Args:
        launch: what `write temp config` returned.
        problems: the warnings of `validate strategy`, kept in the report.

    Returns:
        The report; it is in the run directory as `report.json` too, also when this raises.

    Raises:
        TrainingFailed: with the failure class, the cause in one sentence, advice and the run directory.
    """
    paths = RunPaths(Path(launch.run_dir))
    logger = _logger()
    plan = ShardingPlan.model_validate_json(paths.plan.read_bytes())
    attempt = paths.attempt(launch.attempt)
    base: dict[str, Any] = {
        "run_id": launch.run_id,
        "run_dir": launch.run_dir,
        "plan": plan,
        "problems": tuple(problems),
        "attempts": launch.attempt,
    }
    try:
        with _own_run_watch() as should_stop:
            outcome = run(
                launch,
                on_lines=lambda lines: logger.info("%s", "\n".join(lines)),
                should_stop=should_stop,
            )
    except BaseException as stopped:
        TrainReport(
            state="cancelled",
            failure_class="cancelled",
            cause=f"stopped by {type(stopped).__name__}",
            **base,
            **read_attempt(attempt),
        ).save()
        raise
    report = _report(attempt, outcome, base)
    report.save()
    if report.state != "completed":
        raise TrainingFailed(report.failure_class or "unknown", report.cause, report.advice, report.run_dir)
    logger.info("Model: %s", report.model)
    return report


def _report(attempt: AttemptPaths, outcome: Outcome, base: dict[str, Any]) -> TrainReport:
    """Judge the attempt by what it wrote, never by an exit code alone."""
    found = base | read_attempt(attempt) | {"seconds": outcome.seconds}
    proof = found.get("proof")
    if found.get("saved") and proof is not None and not proof.failures:
        return TrainReport(state="completed", **found)
    failure_class, cause, advice = classify(attempt, outcome.receipt)
    state: RunState = "cancelled" if failure_class in ("cancelled", "preempted") else "failed"
    return TrainReport(state=state, failure_class=failure_class, cause=cause, advice=advice, **found)


@contextlib.contextmanager
def _own_run_watch() -> Iterator[Callable[[], str | None]]:
    """Watch the flow run's state on the server, in a thread of its own, since calls block through an outage.

    After a server outage Prefect's own cancellation never arrives; the run's state does.

    Yields:
        A function that says why the run should stop, or None; it answers at once.
    """
    flow_run_id = runtime.flow_run.id
    found: list[str] = []
    ended = threading.Event()

    def watch() -> None:
        while not found and not ended.wait(WATCH_EVERY_S):
            with contextlib.suppress(Exception), get_client(sync_client=True) as client:
                state = client.read_flow_run(UUID(flow_run_id)).state
                if state is not None and (state.is_cancelling() or state.is_final()):
                    found.append(f"the server says the run is {state.name}")

    if flow_run_id is not None:
        # The context holds the run's API address and settings.
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(watch,), daemon=True, name="soup-own-run-watch").start()
    try:
        yield lambda: found[0] if found else None
    finally:
        ended.set()


def _logger() -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    """Return the run's logger, or the module's outside a run."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger(__name__)
