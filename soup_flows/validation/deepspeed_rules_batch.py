"""Rules about the batch numbers of a DeepSpeed JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator

from soup_flows.validation.deepspeed_config import DeepSpeedJson, at
from soup_flows.validation.table import ACCELERATE, DEEPSPEED, Found, rule, rules_in

TOTAL, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


@rule(
    "DS030",
    "error",
    "deepspeed_config.train_batch_size",
    "DeepSpeed asserts that train_batch_size = micro batch x accumulation x ranks",
    fix='write "auto" for the three batch keys',
    source="deepspeed/runtime/config.py, _batch_assertion",
    versions=DEEPSPEED,
)
def batch_product(config: DeepSpeedJson) -> Iterator[Found]:
    """Batch numbers whose product does not hold, for the run's ranks or for any number of ranks."""
    total, micro, accumulation = (config.number(key) for key in (TOTAL, MICRO, ACCUMULATION))
    numbers = {TOTAL: total, MICRO: micro, ACCUMULATION: accumulation}
    impossible = {k: v for k, v in numbers.items() if v is not None and not 1 <= v < math.inf}
    for key, value in impossible.items():
        yield at(key, f"{key} is {value:g}")
    if total is None or impossible:
        return
    world = config.world_size
    product = (micro or 1) * (accumulation or 1) * (world or 1)
    known = micro is not None and accumulation is not None
    if total % product or (known and world is not None and total != product):
        factors = [
            f"{value:g} {name}"
            for name, value in (("(micro)", micro), ("(accumulation)", accumulation), ("ranks", world))
            if value is not None
        ]
        yield at(TOTAL, f"train_batch_size is {total:g}, and {' x '.join(factors)} is {product:g}")


@rule(
    "DS031",
    "error",
    "deepspeed_config.train_micro_batch_size_per_gpu",
    "DeepSpeed asserts that one of them is there",
    fix='add "train_batch_size", "train_micro_batch_size_per_gpu" and "gradient_accumulation_steps": "auto"',
    source="deepspeed/runtime/config.py, _set_batch_related_parameters",
    versions=DEEPSPEED,
)
def no_batch(config: DeepSpeedJson) -> Iterator[Found]:
    """Neither `train_batch_size` nor `train_micro_batch_size_per_gpu`."""
    if not config.has(TOTAL) and not config.has(MICRO):
        yield at(MICRO, "neither train_batch_size nor train_micro_batch_size_per_gpu is there")


@rule(
    "DS032",
    "error",
    "deepspeed_config.gradient_accumulation_steps",
    "accelerate writes 1 and the batch assertion of DeepSpeed fails",
    fix='add "gradient_accumulation_steps": "auto"',
    source="accelerate/utils/dataclasses.py, DeepSpeedPlugin.__post_init__",
    versions=f"{ACCELERATE}, {DEEPSPEED}",
)
def no_accumulation(config: DeepSpeedJson) -> Iterator[Found]:
    """No `gradient_accumulation_steps` beside `train_batch_size`, in a run that accumulates."""
    if config.run and config.has(TOTAL) and not config.has(ACCUMULATION):
        steps = config.run.plan.batch.gradient_accumulation_steps
        if steps > 1:
            yield at(ACCUMULATION, f"gradient_accumulation_steps is missing and the run accumulates {steps}")


@rule(
    "DS033",
    "warning",
    "deepspeed_config.gradient_accumulation_steps",
    "gradients are right, but the engine counts 1 pass per step: its batch size and throughput are wrong",
    fix='add "gradient_accumulation_steps": "auto"',
    source="accelerate/utils/dataclasses.py, DeepSpeedPlugin.__post_init__",
    versions=f"{ACCELERATE}, {DEEPSPEED}",
)
def accumulation_hidden(config: DeepSpeedJson) -> Iterator[Found]:
    """No `gradient_accumulation_steps` and no `train_batch_size`, in a run that accumulates."""
    if config.run and config.has(MICRO) and not config.has(TOTAL) and not config.has(ACCUMULATION):
        steps = config.run.plan.batch.gradient_accumulation_steps
        if steps > 1:
            yield at(ACCUMULATION, f"gradient_accumulation_steps is missing and the run accumulates {steps}")


@rule(
    "DS034",
    "warning",
    "deepspeed_config.train_micro_batch_size_per_gpu",
    "the global batch changes with the number of GPUs, and with it the number of steps and the schedule",
    fix='write "auto" for the three batch keys and set training.global_batch_size',
    source="deepspeed/runtime/config.py, _set_batch_related_parameters",
    versions=DEEPSPEED,
)
def moving_batch(config: DeepSpeedJson) -> Iterator[Found]:
    """Fixed micro batch and accumulation without a `train_batch_size`."""
    micro, accumulation = config.number(MICRO), config.number(ACCUMULATION)
    if micro and accumulation and config.number(TOTAL) is None:
        yield at(MICRO, f"each rank takes {micro:g} x {accumulation:g} rows per step, whatever the ranks")


RULES = rules_in(globals())
