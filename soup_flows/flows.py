"""The flow `soup-train`: hardware, plan, validation, config, launch, report."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect import flow, runtime

from soup_flows.artifacts import RunConfig, save_plan, save_report, save_run_config
from soup_flows.demo import resolve_demo
from soup_flows.errors import Refused, TrainingFailed, refuse
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from soup_flows.spec import (
    DataSettings,
    DeepSpeedPreset,
    Device,
    FSDPPreset,
    GpuCount,
    LauncherSettings,
    LoraSettings,
    PlainStrategy,
    TrainingSettings,
    TrainingSpec,
    parse_spec,
)
from soup_flows.tasks import (
    detect_hardware,
    launch_distributed_train,
    resolve_sharding_config,
    validate_strategy,
    write_temp_config,
)


# The spec validates the parameters itself: all problems at once, in readable words.
@flow(name="soup-train", validate_parameters=False)
def soup_train(
    model: str,
    dataset: str,
    output_dir: str = "outputs",
    deepspeed: DeepSpeedPreset | None = None,
    fsdp: FSDPPreset | None = None,
    deepspeed_config: str | None = None,
    strategy: PlainStrategy = "auto",
    gpus: GpuCount = "auto",
    device: Device = "auto",
    nvme_path: str | None = None,
    trust_remote_code: bool = False,
    training: TrainingSettings = TrainingSettings(),  # noqa: B008 (a frozen value)
    lora: LoraSettings = LoraSettings(),  # noqa: B008
    data: DataSettings = DataSettings(),  # noqa: B008
    launcher: LauncherSettings = LauncherSettings(),  # noqa: B008
) -> TrainReport:
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
        launcher: How the processes are started, watched and stopped.

    Returns:
        The report; it is in the run directory and in the artifact soup-train-report too.

    Raises:
        Refused: nothing was started; all problems, each with its fix.
        TrainingFailed: a started run ended badly; class, cause, advice.
    """
    return run_training(dict(locals()))


def run_training(values: Mapping[str, Any]) -> TrainReport:
    """Run the five tasks with `values` as the spec; see `soup_train`."""
    run_id = runtime.flow_run.id or str(uuid4())
    try:
        spec = parse_spec(values)
        _check_output_outlives_the_run(spec)
        spec = resolve_demo(spec)
        hardware = detect_hardware(spec.device, [p for p in (spec.output_dir, spec.nvme_path) if p])
        plan = resolve_sharding_config(spec, hardware)
        save_plan(plan)
        problems = validate_strategy(spec, hardware, plan)
    except Refused as refused:
        _record_refusal(values, run_id, refused)
        raise
    launch = write_temp_config(spec, hardware, plan, run_id)
    save_run_config(RunConfig(spec=spec, hardware=hardware, plan=plan, launch=launch))
    try:
        report = launch_distributed_train(launch, problems)
    except TrainingFailed as failed:
        save_report(TrainReport.load(failed.run_dir))
        raise
    save_report(report)
    return report


def _check_output_outlives_the_run(spec: TrainingSpec) -> None:
    """Refuse to write a model into the temporary folder that a process worker deletes after the run."""
    folder = Path(spec.output_dir).expanduser()
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


def _record_refusal(values: Mapping[str, Any], run_id: str, refused: Refused) -> None:
    """Keep why the run was refused: in its run directory, where that can be written, and as an artifact."""
    output_dir = values.get("output_dir")
    default = str(TrainingSpec.model_fields["output_dir"].default)
    paths = RunPaths.of(output_dir if isinstance(output_dir, str) and output_dir else default, run_id)
    report = TrainReport(
        run_id=run_id,
        run_dir=str(paths.root),
        state="refused",
        failure_class="bad_config",
        cause=str(refused),
        problems=refused.problems,
    )
    try:
        report.save()
    except OSError:
        report = report.model_copy(update={"run_dir": "nowhere: the output folder cannot be written"})
    save_report(report)
