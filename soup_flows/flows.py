"""The flow `soup-train`: hardware, data, plan, validation, config, launch, report."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort
from prefect.states import Cancelled

from soup_flows.artifacts import (
    RunConfig,
    save_attempts,
    save_plan,
    save_report,
    save_run_config,
    save_validation,
)
from soup_flows.attempt import CLEANING_S, running_elsewhere
from soup_flows.attempts import check_restarts, reconcile
from soup_flows.block_use import apply_blocks, credentials
from soup_flows.data.prepare import PreparedData
from soup_flows.demo import resolve_demo
from soup_flows.errors import Problem, Refused, TrainingFailed, refuse
from soup_flows.hardware import Hardware
from soup_flows.hooks import sweep_run
from soup_flows.launch.plan import LaunchPlan
from soup_flows.ledger import Change
from soup_flows.own_run import cancel_was_asked, wait_while_paused
from soup_flows.paths import RunPaths
from soup_flows.recovery import begin, decide, move_weights, wait
from soup_flows.rehearse import rehearse
from soup_flows.report import TrainReport
from soup_flows.roots import problems_with_roots
from soup_flows.run_lock import run_lock
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import (
    BlockNames,
    Blocks,
    Data,
    Dataset,
    DataSettings,
    DeepSpeedChoice,
    DeepSpeedFile,
    DeviceChoice,
    FSDPChoice,
    Gpus,
    Launcher,
    LauncherSettings,
    Lora,
    LoraSettings,
    Model,
    NvmeFolder,
    OutputDir,
    Recovery,
    RecoverySettings,
    Strategy,
    Training,
    TrainingSettings,
    TrainingSpec,
    TrustRemoteCode,
    Validation,
    ValidationSettings,
    parse_spec,
)
from soup_flows.tasks import (
    detect_hardware,
    launch_distributed_train,
    plan_or_explain,
    prepare_dataset,
    resolve_sharding_config,
    validate_strategy,
    write_temp_config,
)
from soup_flows.user_file import expanded


# The spec validates the parameters itself: all problems at once, in readable words.
@flow(
    name="soup-train",
    validate_parameters=False,
    on_cancellation=[sweep_run],
    on_crashed=[sweep_run],
)
def soup_train(
    model: Model,
    dataset: Dataset,
    output_dir: OutputDir = "outputs",
    deepspeed: DeepSpeedChoice = None,
    fsdp: FSDPChoice = None,
    deepspeed_config: DeepSpeedFile = None,
    strategy: Strategy = "auto",
    gpus: Gpus = "auto",
    device: DeviceChoice = "auto",
    nvme_path: NvmeFolder = None,
    trust_remote_code: TrustRemoteCode = False,
    training: Training = TrainingSettings(),  # noqa: B008 (a frozen value)
    lora: Lora = LoraSettings(),  # noqa: B008
    data: Data = DataSettings(),  # noqa: B008
    recovery: Recovery = RecoverySettings(),  # noqa: B008
    launcher: Launcher = LauncherSettings(),  # noqa: B008
    validation: Validation = ValidationSettings(),  # noqa: B008
    blocks: Blocks = BlockNames(),  # noqa: B008
) -> TrainReport | State:
    """Fine-tune a model on the GPUs of this machine: planned or refused, proven, supervised, explained.

    Args:
        model: Folder with config.json, or a Hub id; demo://tiny-llama builds a tiny random model.
        dataset: JSONL, JSON, CSV, Parquet or text file, or a folder of them; demo://stdlib-qa is made from
            the standard library's documentation.
        output_dir: Runs are kept in <output_dir>/runs/<run id>/.
        deepspeed: DeepSpeed ZeRO preset. Not together with fsdp or deepspeed_config.
        fsdp: PyTorch FSDP2 preset. Not together with deepspeed or deepspeed_config.
        deepspeed_config: Path of your own DeepSpeed JSON, used byte for byte.
        strategy: Without a preset: auto picks, single and ddp shard nothing.
        gpus: GPUs of this machine, one rank each (auto: all that are visible); CPU ranks with device=cpu.
        device: auto and cuda need GPUs; cpu runs the ranks on CPU over gloo.
        nvme_path: Folder on a local NVMe disk, for the preset zero3_nvme.
        trust_remote_code: Run the Python code in the model's repository with your rights.
        training: How the model is trained.
        lora: Adapter settings, for training.method=lora.
        data: What the rows mean and how long they may be.
        recovery: What is saved on the way, what a run goes on from, and what happens after a failure.
        launcher: How the processes are started, watched and stopped.
        validation: Which findings of the validation count: silenced rules, and warnings as errors.
        blocks: Names of blocks: credentials, tracker, checkpoint store, placement.

    Returns:
        The report; it is in the run directory and in the artifact soup-train-report too. A run that was
        cancelled in Prefect, or stopped on request, ends in the state Cancelled.

    Raises:
        Refused: nothing was started; all problems, each with its fix.
        TrainingFailed: a started run ended badly; class, cause, advice.
    """
    return run_training(dict(locals()))


@dataclass(frozen=True)
class Ready:
    """A run that was planned and not refused, and stands before its next attempt."""

    run_id: str
    paths: RunPaths
    spec: TrainingSpec
    """What was asked; `change` says what recovery made of it."""
    hardware: Hardware
    data: PreparedData
    problems: Sequence[Problem]
    change: Change
    plan: ShardingPlan
    launch: LaunchPlan

    def with_change(self, change: Change) -> Ready:
        """Plan the next attempt; the strategy is kept unless `change` names another."""
        spec = change.apply(self.spec)
        plan = resolve_sharding_config(spec, self.hardware, self.data, self.plan)
        launch = write_temp_config(spec, self.hardware, plan, self.run_id, change, self.data)
        return replace(self, change=change, plan=plan, launch=launch)

    def replanned(self, change: Change) -> ShardingPlan | None:
        """Return what `with_change` would plan, or None if it would be refused; nothing is written."""
        try:
            return plan_or_explain(change.apply(self.spec), self.hardware, self.data.train_rows, self.plan)
        except Refused:
            return None


def run_training(values: Mapping[str, Any]) -> TrainReport | State:
    """Run the six tasks with `values` as the spec, again after failures that another attempt may survive.

    See `soup_train` for the values. Each attempt is a task run of its own, with its number in its name;
    Prefect's own retries stay at 0, so that nothing is multiplied.
    """
    run_id = runtime.flow_run.id or str(uuid4())
    with contextlib.ExitStack() as held:
        return _run_attempts(values, run_id, held)


def _run_attempts(values: Mapping[str, Any], run_id: str, held: contextlib.ExitStack) -> TrainReport | State:
    """Do the work of `run_training`; the run is held by `held` once its directory is known."""
    try:
        ready = _make_ready(values, run_id, held)
    except Refused as refused:
        _leave_to_the_other(refused)
        _record_refusal(values, run_id, refused)
        raise
    if isinstance(ready, TrainReport):
        return ready
    while True:
        try:
            report = _attempt(ready)
        except TrainingFailed as failed:
            report = TrainReport.load(failed.run_dir)
            if report.failure_class == "cancelled" and wait_while_paused():
                ready.paths.stop_request.unlink(missing_ok=True)
                ready = ready.with_change(ready.change)
                continue
            if report.failure_class == "cluster_silent":  # its job may still run: no other attempt
                save_report(report)
                raise
            decision = decide(ready.spec.recovery, ready.plan, report.ledger, ready.replanned)
            save_attempts(report, decision.reason)
            get_run_logger().warning("Attempt %d: %s", ready.launch.attempt, decision.reason)
            if not decision.retry or wait(decision.wait_s, ready.paths) or cancel_was_asked():
                save_report(report)
                if report.failure_class == "cancelled" or cancel_was_asked():
                    # From Cancelling the server lets a run come to Cancelled only; a failure would stay there.
                    return Cancelled(message=str(failed))
                raise
        else:
            save_attempts(report)
            save_report(report)
            return report
        if decision.change.strategy != ready.change.strategy:
            decision = move_weights(ready.paths, decision, report.total_steps)
        try:
            ready = ready.with_change(decision.change)
        except Refused:  # the attempt before it is what ended the run
            save_report(report)
            raise


def _make_ready(values: Mapping[str, Any], run_id: str, held: contextlib.ExitStack) -> Ready | TrainReport:
    """Detect, prepare, plan, validate and write; a report when this work is finished already."""
    spec = apply_blocks(parse_spec(values))
    _check_output_outlives_the_run(spec)
    spec = resolve_demo(spec)
    paths = RunPaths.of(spec.output_dir, run_id)
    held.enter_context(run_lock(paths, spec.launcher.stop_budget_s + CLEANING_S))
    spec, finished = begin(spec, paths)
    if finished is not None:
        get_run_logger().info("Nothing to do, this work is finished: %s", finished.run_dir)
        save_report(finished)
        return finished
    with credentials(spec):
        running = running_elsewhere(paths)
    if running is not None:
        return _rejoin(spec, paths, run_id, running)
    places = [p for p in (spec.output_dir, spec.nvme_path) if p]
    hardware = detect_hardware(spec.device, places, *spec.recorded_machine)
    rows = reconcile(paths, spec.recovery)
    check_restarts(rows, spec.recovery, paths.root)
    change = rows[-1].change if rows else Change()
    asked = change.apply(spec)
    plan_or_explain(asked, hardware)  # what cannot be planned is refused before a row is read
    data = prepare_dataset(spec)
    plan = resolve_sharding_config(asked, hardware, data, last_plan(paths) if rows else None)
    save_plan(plan)
    problems = validate_strategy(asked, hardware, plan)
    if spec.validation.rehearse and not rows:
        found = rehearse(asked, plan, paths.rehearsal, run_id)
        get_run_logger().info("%s", "\n".join(map(str, found)))
        problems += found
    save_validation(problems, spec.validation.silence)
    launch = write_temp_config(asked, hardware, plan, run_id, change, data)
    return Ready(run_id, paths, spec, hardware, data, problems, change, plan, launch)


def _rejoin(spec: TrainingSpec, paths: RunPaths, run_id: str, running: LaunchPlan) -> Ready:
    """Stand where the flow stood that submitted the attempt, from the files that it left."""
    get_run_logger().info("Attempt %d outlived its flow; going on with it: %s", running.attempt, paths.root)
    rows = reconcile(paths, spec.recovery, running=running.attempt)
    return Ready(
        run_id,
        paths,
        spec,
        Hardware.model_validate_json(paths.hardware.read_bytes()),
        PreparedData.model_validate_json(paths.data.read_bytes()),
        (),
        rows[-1].change if rows else Change(),
        ShardingPlan.model_validate_json(paths.plan.read_bytes()),
        running,
    )


def _attempt(ready: Ready) -> TrainReport:
    """Launch one attempt, as a task run that has its number in its name."""
    spec = ready.change.apply(ready.spec)
    save_run_config(RunConfig(spec=spec, hardware=ready.hardware, plan=ready.plan, launch=ready.launch))
    named = launch_distributed_train.with_options(
        task_run_name=f"launch distributed train, attempt {ready.launch.attempt}"
    )
    return named(ready.launch, ready.problems, ready.change)


def last_plan(paths: RunPaths) -> ShardingPlan | None:
    """Return the plan of the run's last attempt; None if there is none that can be read."""
    try:
        return ShardingPlan.model_validate_json(paths.plan.read_bytes())
    except (OSError, ValueError):
        return None


def _check_output_outlives_the_run(spec: TrainingSpec) -> None:
    """Refuse to write a model into the temporary folder that a process worker deletes after the run."""
    folder = expanded(spec.output_dir)
    temporary = Path(tempfile.gettempdir()).resolve()
    doomed = [
        p for p in (Path.cwd(), *Path.cwd().parents) if p.parent == temporary and p.name.endswith("prefect")
    ]
    if runtime.deployment.id is not None and not folder.is_absolute() and doomed:
        raise refuse(
            "FLOW001",
            "output_dir",
            f"{spec.output_dir!r} is relative, and the worker deletes its working folder {doomed[0]} after the run",
            "give an absolute folder, or set the work pool's job variable working_dir",
            "prefect 3.9.1 workers/process.py (TemporaryDirectory)",
        )


def _leave_to_the_other(refused: Refused) -> None:
    """End this process without a word to the server if another one is running this very flow run.

    A worker reports a killed process twice, half a minute apart on a busy server (prefect 3.9.1, workers/base.py,
    `_propose_crashed_state`), and what restarts crashed runs may answer twice.

    Raises:
        Abort: the process ends with the exit code 0, and the state of the flow run is the other's to set.
    """
    held = _held_by_another(refused)
    if held is not None and runtime.flow_run.id:
        get_run_logger().warning("%s: this start leaves the run to that process.", held.message)
        raise Abort(held.message)


def _held_by_another(refused: Refused) -> Problem | None:
    """Return the problem that says so if another process is running the run."""
    return next((problem for problem in refused.problems if problem.id == "RUN001"), None)


def _record_refusal(values: Mapping[str, Any], run_id: str, refused: Refused) -> None:
    """Keep why the run was refused: in its run directory, where that can be written, and as an artifact."""
    output_dir = values.get("output_dir")
    default = str(TrainingSpec.model_fields["output_dir"].default)
    folder = output_dir if isinstance(output_dir, str) and output_dir else default
    paths = RunPaths.of(folder, run_id)
    report = TrainReport(
        run_id=run_id,
        run_dir=str(paths.root),
        state="refused",
        failure_class="bad_config",
        cause=str(refused),
        problems=refused.problems,
    )
    try:
        if problems_with_roots({"output_dir": str(paths.root)}):
            raise PermissionError(folder)
        if _held_by_another(refused) is None:  # else the report is the other's to write
            report.save()
    except OSError:
        report = report.model_copy(update={"run_dir": "nowhere: the output folder cannot be written"})
    save_validation(refused.problems, {})
    save_report(report)
