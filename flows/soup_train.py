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
    TrustRemoteCode,
    Validation,
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
    """Fine-tune a model on the GPUs of this machine; see soup_flows.flows.soup_train for the parameters."""
    return run_training(dict(locals()))


if __name__ == "__main__":
    soup_train(model=sys.argv[1], dataset=sys.argv[2])
