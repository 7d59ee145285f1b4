"""The flow `soup-train`: hardware, plan, validation, config, launch, report."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import uuid4

from prefect import flow, runtime
from pydantic import Field

from soup_flows.artifacts import RunConfig, save_report, save_run_config
from soup_flows.demo import resolve_demo
from soup_flows.errors import Refused
from soup_flows.paths import RunPaths
from soup_flows.report import TrainReport
from soup_flows.spec import (
    DataSettings,
    DeepSpeedPreset,
    Device,
    FSDPPreset,
    LauncherSettings,
    LoraSettings,
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

Title = Annotated


@flow(name="soup-train", validate_parameters=False, description="Multi-GPU fine-tuning, planned and proven.")
def soup_train(
    model: str,
    dataset: str,
    output_dir: str = "outputs",
    deepspeed: DeepSpeedPreset | None = None,
    fsdp: FSDPPreset | None = None,
    deepspeed_config: str | None = None,
    gpus: Annotated[int, Field(ge=1)] | Any = "auto",
) -> TrainReport:
    """x."""
