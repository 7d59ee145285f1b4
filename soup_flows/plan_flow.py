"""The flow `soup-plan`: what `soup-train` would run, or why it would be refused; starts nothing, needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from prefect import flow, get_run_logger
from pydantic import Field

from soup_flows.artifacts import save_plan, save_validation
from soup_flows.block_use import apply_blocks
from soup_flows.cli_plan import machine, plan_and_validate
from soup_flows.demo import resolve_demo
from soup_flows.errors import Refused
from soup_flows.gpus import GPUS
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
    Lora,
    LoraSettings,
    Model,
    NvmeFolder,
    Strategy,
    Training,
    TrainingSettings,
    TrustRemoteCode,
    parse_spec,
    titled,
)

GpuName = Annotated[
    str | None, Field(json_schema_extra={"title": "GPUs to plan for", "enum": [*sorted(GPUS), None]})
]


# parse_spec explains wrong parameters itself, all at once
@flow(name="soup-plan", validate_parameters=False)
def soup_plan(
    model: Model,
    dataset: Dataset,
    gpu: GpuName = None,
    nodes: Annotated[int, titled("Machines", ge=1, le=1024)] = 1,
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
    blocks: Blocks = BlockNames(),  # noqa: B008
) -> ShardingPlan:
    """Plan a fine-tune: strategy, batch, memory per rank, every candidate with its why-not, and the findings.

    Args:
        model: Folder with config.json, or a Hub id.
        dataset: File or folder of the rows; their number decides the steps.
        gpu: Plan for GPUs of this kind that need not be here; empty plans for the worker's machine.
        nodes: Machines with that many GPUs each.
        deepspeed: DeepSpeed ZeRO preset. Not together with fsdp or deepspeed_config.
        fsdp: PyTorch FSDP2 preset. Not together with deepspeed or deepspeed_config.
        deepspeed_config: Path of your own DeepSpeed JSON.
        strategy: Without a preset: auto picks, single and ddp shard nothing.
        gpus: GPUs of a machine (auto: all that are visible, or 8 of the kind gpu).
        device: auto and cuda need GPUs; cpu plans for ranks on CPU.
        nvme_path: Folder on a local NVMe disk, for the preset zero3_nvme.
        trust_remote_code: The plan says what that allows; nothing is run.
        training: How the model is trained.
        lora: Adapter settings, for training.method=lora.
        data: What the rows mean and how long they may be.
        blocks: Names of blocks; placement and tracker change the plan.

    Returns:
        The plan; it is in the artifact soup-train-plan too, the findings in soup-train-validation.

    Raises:
        Refused: what cannot be planned, or would be refused, with every problem.
    """
    values = {name: value for name, value in locals().items() if name not in ("gpu", "nodes")}
    return _plan(values, gpu, nodes)


def _plan(values: Mapping[str, Any], gpu: str | None, nodes: int) -> ShardingPlan:
    """Plan, and keep the pages whether it is refused or not."""
    try:
        spec = resolve_demo(apply_blocks(parse_spec(values)))
        plan, problems = plan_and_validate(spec, machine(spec, gpu), nodes, local=gpu is None)
    except Refused as refused:
        save_validation(refused.problems, {})
        raise
    save_plan(plan)
    save_validation(problems, spec.validation.silence)
    if any(problem.severity == "error" for problem in problems):
        raise Refused(problems)
    get_run_logger().info("Plan: %s on %d rank(s); %s", plan.strategy, plan.world_size, plan.reason)
    return plan
