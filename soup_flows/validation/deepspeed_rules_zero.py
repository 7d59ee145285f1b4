"""Rules about the ZeRO block of a DeepSpeed JSON and the blocks beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from soup_flows.units import ranks
from soup_flows.validation.deepspeed_config import DeepSpeedJson, at
from soup_flows.validation.table import DEEPSPEED, TRANSFORMERS, Found, rule, rules_in

OFFLOAD = ("offload_optimizer", "offload_param")
QUANTISED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def _zero_path(key: str) -> str:
    return f"zero_optimization.{key}"


@rule(
    "DS060",
    "error",
    "deepspeed_config.zero_optimization.offload_param",
    "DeepSpeed accepts and ignores it: no parameter leaves the GPU",
    fix="use stage 3, or drop offload_param",
    source="deepspeed/runtime/zero/config.py: offload_param is for stage 3",
    versions=DEEPSPEED,
)
def param_offload_below_3(config: DeepSpeedJson) -> Iterator[Found]:
    """`offload_param` below stage 3."""
    if config.stage in (0, 1, 2) and config.device("offload_param") in ("cpu", "nvme"):
        yield at(_zero_path("offload_param"), f"offload_param at stage {config.stage}")


@rule(
    "DS061",
    "error",
    "deepspeed_config.zero_optimization.offload_optimizer.device",
    "DeepSpeed keeps the optimizer state in CPU memory without a word",
    fix='use stage 3, or the device "cpu"',
    source="deepspeed/runtime/zero/stage_1_and_2.py: no swapping below stage 3",
    versions=DEEPSPEED,
)
def nvme_below_3(config: DeepSpeedJson) -> Iterator[Found]:
    """Optimizer state on NVMe below stage 3."""
    if config.stage in (0, 1, 2) and config.device("offload_optimizer") == "nvme":
        yield at(_zero_path("offload_optimizer.device"), f"NVMe at stage {config.stage}")


@rule(
    "DS062",
    "error",
    "deepspeed_config.zero_optimization.offload_optimizer.nvme_path",
    "the ranks assert on it after the model was loaded",
    fix="give an absolute folder on a local NVMe disk",
    source="deepspeed/runtime/zero/partition_parameters.py, partition_optimizer_swapper.py",
    versions=DEEPSPEED,
)
def no_nvme_path(config: DeepSpeedJson) -> Iterator[Found]:
    """Off-load to NVMe without an absolute `nvme_path`."""
    for block in OFFLOAD:
        path = config.get(_zero_path(f"{block}.nvme_path"))
        if config.device(block) == "nvme" and not (isinstance(path, str) and os.path.isabs(path)):
            yield at(_zero_path(f"{block}.nvme_path"), f"{block} goes to NVMe and nvme_path is {path!r}")


@rule(
    "DS063",
    "warning",
    "deepspeed_config.zero_optimization.overlap_comm",
    "wrong gradients, NaN and a loss of 0 were reported with it on GPUs",
    fix="write false, DeepSpeed's default at these stages",
    source="deepspeedai/DeepSpeed#4298, #5294, #7965, #8061",
    versions=DEEPSPEED,
)
def overlap_below_3(config: DeepSpeedJson) -> Iterator[Found]:
    """`overlap_comm` at stage 1 or 2."""
    if config.stage in (1, 2) and config.get(_zero_path("overlap_comm")) is True:
        yield at(_zero_path("overlap_comm"), f"overlap_comm at stage {config.stage}")


@rule(
    "DS064",
    "error",
    "deepspeed_config.zero_optimization.zero_hpz_partition_size",
    "DeepSpeed asserts that it divides the ranks",
    fix="use the ranks per node, or leave it out",
    source="deepspeed/utils/groups.py, _create_zero_param_parallel_group",
    versions=DEEPSPEED,
)
def hpz_does_not_divide(config: DeepSpeedJson) -> Iterator[Found]:
    """`zero_hpz_partition_size` that does not divide the number of ranks."""
    hpz, world = config.number(_zero_path("zero_hpz_partition_size")), config.world_size
    if hpz and hpz > 1 and world and hpz < world and world % hpz:
        yield at(_zero_path("zero_hpz_partition_size"), f"{hpz:g} does not divide {world} ranks")


@rule(
    "DS065",
    "warning",
    "deepspeed_config.zero_optimization.zero_hpz_partition_size",
    "the second copy of the weights costs memory and saves no traffic",
    fix="leave it out on one node",
    source="deepspeedai/DeepSpeed#7606, #7707: larger values are cut to the ranks",
    versions=DEEPSPEED,
)
def hpz_for_nothing(config: DeepSpeedJson) -> Iterator[Found]:
    """`zero_hpz_partition_size` on one node, or as large as all ranks."""
    hpz = config.number(_zero_path("zero_hpz_partition_size"))
    if config.run and hpz and hpz > 1 and config.stage == 3:
        plan = config.run.plan
        if plan.nodes == 1 or hpz >= plan.world_size:
            where = f"{ranks(plan.world_size)} on {plan.nodes} node(s)"
            yield at(_zero_path("zero_hpz_partition_size"), f"{hpz:g} with {where}")


@rule(
    "DS066",
    "error",
    "deepspeed_config.zero_optimization",
    "ZeRO++ exists at stage 3 only, and the key is ignored",
    fix="use stage 3, or drop it",
    source="deepspeed/runtime/engine.py: the key is handed to the stage 3 optimizer only",
    versions=DEEPSPEED,
)
def zeropp_below_3(config: DeepSpeedJson) -> Iterator[Found]:
    """A ZeRO++ key below stage 3."""
    for key in ("zero_hpz_partition_size", *QUANTISED):
        value = config.get(_zero_path(key))
        if config.stage in (0, 1, 2) and value not in (None, False, 0, 1):
            yield at(_zero_path(key), f"{key} at stage {config.stage}")


@rule(
    "DS067",
    "warning",
    "deepspeed_config.zero_optimization.zero_quantized_weights",
    "weights go through fp16 on their way, and values beyond its range are clipped",
    fix="set it to false, or train in fp16",
    source="deepspeed/runtime/zero/partition_parameters.py; deepspeedai/DeepSpeed#7775, #7792",
    versions=DEEPSPEED,
)
def quantised_weights(config: DeepSpeedJson) -> Iterator[Found]:
    """Quantised weights of ZeRO++ in a run that is not fp16."""
    key = "zero_quantized_weights"
    if config.stage == 3 and config.get(_zero_path(key)) is True and config.dtype not in ("fp16", None):
        yield at(_zero_path(key), f"{key} with {config.dtype}")


@rule(
    "DS068",
    "warning",
    "deepspeed_config.zero_optimization.zero_quantized_gradients",
    "DeepSpeed uses it between nodes only, so it is off",
    fix="set it to false",
    source="deepspeed/runtime/zero/stage3.py: num_nodes > 1",
    versions=DEEPSPEED,
)
def quantised_gradients_one_node(config: DeepSpeedJson) -> Iterator[Found]:
    """Quantised gradients of ZeRO++ on one node."""
    key = "zero_quantized_gradients"
    if config.run and config.run.plan.nodes == 1 and config.get(_zero_path(key)) is True:
        yield at(_zero_path(key), f"{key} on one node")


@rule(
    "DS069",
    "error",
    "deepspeed_config.zero_optimization.zero_quantized_gradients",
    "the kernel reads the gradients as fp16 and they are corrupted",
    fix="set it to false, or train in fp16",
    source="deepspeed/ops/csrc/quantization/pt_binding.cpp; deepspeedai/DeepSpeed#4886",
    versions=DEEPSPEED,
)
def quantised_gradients(config: DeepSpeedJson) -> Iterator[Found]:
    """Quantised gradients of ZeRO++ between nodes in a run that is not fp16."""
    key = "zero_quantized_gradients"
    several = config.run is None or config.run.plan.nodes > 1
    if several and config.get(_zero_path(key)) is True and config.dtype not in ("fp16", None):
        yield at(_zero_path(key), f"{key} with {config.dtype}")


@rule(
    "DS070",
    "error",
    "deepspeed_config.zero_optimization.zero_quantized_nontrainable_weights",
    "DeepSpeed asserts fp16 for it",
    fix="set it to false, or train in fp16",
    source="deepspeed/runtime/zero/stage3.py; deepspeedai/DeepSpeed#4885",
    versions=DEEPSPEED,
)
def quantised_frozen(config: DeepSpeedJson) -> Iterator[Found]:
    """Quantised frozen weights in a run that is not fp16."""
    key = "zero_quantized_nontrainable_weights"
    if config.stage == 3 and config.get(_zero_path(key)) is True and config.dtype not in ("fp16", None):
        yield at(_zero_path(key), f"{key} with {config.dtype}")


@rule(
    "DS071",
    "error",
    "deepspeed_config.zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "the final save writes DeepSpeed shards and no model.safetensors, and the run ends without a model",
    fix='add "stage3_gather_16bit_weights_on_model_save": true',
    source="transformers/trainer.py, save_model under DeepSpeed",
    versions=f"{TRANSFORMERS}, {DEEPSPEED}",
)
def no_gather(config: DeepSpeedJson) -> Iterator[Found]:
    """Stage 3 and every weight trained, without gathering the weights for the save."""
    old = config.get(_zero_path("stage3_gather_fp16_weights_on_model_save"))
    if (
        config.run
        and config.run.full
        and config.stage == 3
        and config.zero("gather_16bit_weights_on_model_save") is not True
        and old is not True
    ):
        path = _zero_path("stage3_gather_16bit_weights_on_model_save")
        yield at(path, "the weights are not gathered on save")


@rule(
    "DS072",
    "error",
    "deepspeed_config.zero_optimization.compute_grad_norm",
    "DeepSpeed refuses it",
    fix="leave it out",
    source="deepspeed/runtime/zero/config.py, compute_grad_norm_valid; runtime/engine.py",
    versions=DEEPSPEED,
)
def no_norm(config: DeepSpeedJson) -> Iterator[Found]:
    """`compute_grad_norm: false` at stage 0 or 3, with clipping, or with off-load."""
    if config.get(_zero_path("compute_grad_norm")) is not False:
        return
    clipped = config.get("gradient_clipping") != 0
    if config.stage not in (1, 2) or clipped or config.device("offload_optimizer") != "none":
        yield at(_zero_path("compute_grad_norm"), "compute_grad_norm is false")


@rule(
    "DS073",
    "error",
    "deepspeed_config.zero_optimization.offload_optimizer.ratio",
    "DeepSpeed asserts stage 3 for a partial off-load",
    fix="use stage 3, or drop ratio",
    source="deepspeed/runtime/zero/config.py, offload_ratio_check",
    versions=DEEPSPEED,
)
def partial_below_3(config: DeepSpeedJson) -> Iterator[Found]:
    """An off-load `ratio` below 1 at stage 1 or 2."""
    ratio = config.number(_zero_path("offload_optimizer.ratio"))
    if ratio is not None and ratio < 1 and config.stage != 3:
        yield at(_zero_path("offload_optimizer.ratio"), f"ratio {ratio:g} at stage {config.stage}")


@rule(
    "DS074",
    "error",
    "deepspeed_config.checkpoint.load_universal",
    "every resume looks for a universal checkpoint, which this run does not write",
    fix="leave it out",
    source="deepspeed/runtime/engine.py, load_checkpoint",
    versions=DEEPSPEED,
)
def load_universal(config: DeepSpeedJson) -> Iterator[Found]:
    """`checkpoint.load_universal` left on."""
    if config.get("checkpoint.load_universal") is True:
        yield at("checkpoint.load_universal", "load_universal is true")


@rule(
    "DS075",
    "warning",
    "deepspeed_config.zero_optimization",
    "DeepSpeed takes the 0 literally: one optimizer group a parameter, nothing fetched ahead or kept; very slow",
    fix="leave it out (1e9 is the default)",
    source="deepspeed/runtime/zero/partitioned_param_coordinator.py, stage3.py",
    versions=DEEPSPEED,
)
def zeros(config: DeepSpeedJson) -> Iterator[Found]:
    """Stage 3 with `sub_group_size`, `max_live_parameters` or `max_reuse_distance` of 0."""
    if config.stage == 3:
        for key in ("sub_group_size", "max_live_parameters", "max_reuse_distance"):
            if config.zero(key) == 0 and not isinstance(config.zero(key), bool):
                name = key if key == "sub_group_size" else f"stage3_{key}"
                yield at(_zero_path(name), f"{name} is 0")


RULES = rules_in(globals())
