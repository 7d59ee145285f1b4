"""The flow `soup-train` as a script to copy: the deployment entry, and a program to run.

    python flows/soup_train.py MODEL DATASET        # runs it here, on every visible GPU
    prefect deploy flows/soup_train.py:soup_train   # deploys it

The package's own flow, `soup_flows.flows.soup_train`, has the same parameters; a test keeps the two equal.
"""

import sys

from prefect import flow
from prefect.client.schemas.objects import State

from soup_flows.flows import run_training
from soup_flows.hooks import sweep_run
from soup_flows.report import TrainReport
from soup_flows.spec import (
    BlockNames,
    DataSettings,
    DeepSpeedPreset,
    Device,
    FSDPPreset,
    GpuCount,
    LauncherSettings,
    LoraSettings,
    PlainStrategy,
    RecoverySettings,
    TrainingSettings,
    ValidationSettings,
)


# run_training explains wrong parameters itself, all at once
@flow(
    name="soup-train",
    validate_parameters=False,
    on_cancellation=[sweep_run],
    on_crashed=[sweep_run],
)
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
    recovery: RecoverySettings = RecoverySettings(),  # noqa: B008
    launcher: LauncherSettings = LauncherSettings(),  # noqa: B008
    validation: ValidationSettings = ValidationSettings(),  # noqa: B008
    blocks: BlockNames = BlockNames(),  # noqa: B008
) -> TrainReport | State:
    """Fine-tune a model on the GPUs of this machine; see soup_flows.flows.soup_train for the parameters."""
    return run_training(dict(locals()))


if __name__ == "__main__":
    soup_train(model=sys.argv[1], dataset=sys.argv[2])
