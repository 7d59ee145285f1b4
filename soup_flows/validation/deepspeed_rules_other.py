"""Rules about a DeepSpeed JSON without a stage, and about what does nothing here, costs time, or leaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from soup_flows.validation.deepspeed_config import DeepSpeedJson, at
from soup_flows.validation.deepspeed_rules_keys import shown
from soup_flows.validation.table import ACCELERATE, DEEPSPEED, TRANSFORMERS, Found, rule, rules_in

MONITORS = ("wandb", "tensorboard", "csv_monitor", "comet")


@rule(
    "DS029",
    "error",
    "deepspeed_config.zero_optimization",
    "accelerate stops, or another stage than meant is used",
    fix='write {"stage": 1}, 2 or 3',
    source="accelerate/utils/dataclasses.py, DeepSpeedPlugin; deepspeed/runtime/zero/config.py",
    versions=f"{ACCELERATE}, {DEEPSPEED}",
)
def no_stage(config: DeepSpeedJson) -> Iterator[Found]:
    """No `zero_optimization` block, or one without a stage from 0 to 3."""
    block = config.get("zero_optimization")
    if not isinstance(block, Mapping):
        yield at(
            "zero_optimization",
            f"zero_optimization is {'missing' if not config.has('zero_optimization') else shown(block)}",
        )
    elif block.get("stage") != "auto" and block.get("stage", 0) not in (0, 1, 2, 3):
        yield at("zero_optimization.stage", f"zero_optimization.stage is {shown(block.get('stage'))}")
    elif isinstance(block.get("stage"), bool):
        yield at("zero_optimization.stage", f"zero_optimization.stage is {block['stage']}")


@rule(
    "DS080",
    "warning",
    "deepspeed_config.activation_checkpointing",
    "it has no effect: Hugging Face models use torch's checkpointing",
    fix="set training.gradient_checkpointing instead and delete the block",
    source="huggingface/transformers#22099, deepspeedai/DeepSpeed#5704",
    versions=f"{DEEPSPEED}, {TRANSFORMERS}",
)
def activation_checkpointing(config: DeepSpeedJson) -> Iterator[Found]:
    """An `activation_checkpointing` block that switches something on."""
    block = config.get("activation_checkpointing")
    if isinstance(block, Mapping) and any(block.values()):
        yield at("activation_checkpointing", "activation_checkpointing is configured in the JSON")


@rule(
    "DS081",
    "warning",
    "deepspeed_config.wandb",
    "DeepSpeed starts a logger of its own, beside the run's",
    fix="delete the block",
    source="deepspeed/monitor/monitor.py",
    versions=DEEPSPEED,
)
def monitors(config: DeepSpeedJson) -> Iterator[Found]:
    """A monitor of DeepSpeed that is on."""
    for name in MONITORS:
        if config.get(f"{name}.enabled") is True:
            yield at(name, f"{name} is on")


@rule(
    "DS082",
    "warning",
    "deepspeed_config.wall_clock_breakdown",
    "the GPU is synchronised for it, and training is slower",
    fix="leave it out unless you measure",
    source="DeepSpeed configuration reference, logging and flops profiler",
    versions=DEEPSPEED,
)
def measuring(config: DeepSpeedJson) -> Iterator[Found]:
    """Timers, profilers or dumps left on."""
    for path in (
        *("wall_clock_breakdown", "memory_breakdown", "dump_state"),
        *("flops_profiler.enabled", "comms_logger.enabled"),
    ):
        if config.get(path) is True:
            yield at(path, f"{path} is on")


@rule(
    "DS083",
    "error",
    "deepspeed_config",
    "this training program runs data parallel only, and the ranks would not agree on the batch",
    fix="delete the block",
    source="deepspeed/runtime/engine.py: the data-parallel size is no longer the number of ranks",
    versions=DEEPSPEED,
)
def other_parallelism(config: DeepSpeedJson) -> Iterator[Found]:
    """Tensor, sequence, pipeline or expert parallelism, or the hybrid engine, switched on."""
    for path in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
        if (config.number(path) or 1) > 1:
            yield at(path, f"{path} is {config.number(path):g}")
    for path in ("hybrid_engine.enabled", "expert_parallel.enabled", "autotuning.enabled"):
        if config.get(path) is True:
            yield at(path, f"{path} is on")


@rule(
    "DS084",
    "warning",
    "deepspeed_config.data_efficiency",
    "it works on DeepSpeed's own data loader, and Trainer brings its own, so it does nothing",
    fix="delete the block",
    source="deepspeed/runtime/engine.py, deepspeed_io",
    versions=DEEPSPEED,
)
def data_efficiency(config: DeepSpeedJson) -> Iterator[Found]:
    """`data_efficiency` switched on, or `dataloader_drop_last`."""
    for path in ("data_efficiency.enabled", "dataloader_drop_last"):
        if config.get(path) is True:
            yield at(path, f"{path} is on")


@rule(
    "DS085",
    "error",
    "deepspeed_config.gradient_allreduce_op",
    "the gradients are added over the ranks instead of averaged: the step grows with the GPUs, and stage 3 refuses",
    fix="leave it out",
    source="deepspeed/runtime/config.py, _do_error_check",
    versions=DEEPSPEED,
)
def summed_gradients(config: DeepSpeedJson) -> Iterator[Found]:
    """`gradient_allreduce_op` of `sum`."""
    value = config.get("gradient_allreduce_op")
    if isinstance(value, str) and value.lower() == "sum":
        yield at("gradient_allreduce_op", "gradient_allreduce_op is sum")


@rule(
    "SE003",
    "warning",
    "deepspeed_config.comet.api_key",
    "the config is copied into the run directory and shown in reports, the key with it",
    fix="remove it and set COMET_API_KEY in the environment",
    source="this package: the run directory keeps the config of each run",
)
def secret_in_json(config: DeepSpeedJson) -> Iterator[Found]:
    """An API key in the DeepSpeed JSON."""
    for path, value in config.walk():
        if path.rsplit(".", 1)[-1] in ("api_key", "token", "password", "secret") and value:
            yield at(path, f"{path} holds a secret")


RULES = rules_in(globals())
