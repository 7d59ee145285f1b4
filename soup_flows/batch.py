"""Batch arithmetic: the global batch is kept, everything else follows from it."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field, model_validator

from soup_flows.errors import refuse
from soup_flows.units import ranks

DEFAULT_MICRO_BATCH = 8
"""Largest micro batch that is chosen when none is given."""


class Batch(BaseModel):
    """How the rows of one optimizer step are spread over ranks and passes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_device_train_batch_size: int = Field(ge=1)
    """Micro batch: rows a rank computes at once."""
    gradient_accumulation_steps: int = Field(ge=1)
    """Passes of each rank per optimizer step."""
    world_size: int = Field(ge=1)
    """Ranks over all nodes."""
    global_batch_size: int = Field(ge=1)
    """Rows per optimizer step: the product of the three above."""

    @model_validator(mode="after")
    def _product_holds(self) -> Batch:
        product = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
        if product != self.global_batch_size:
            raise ValueError(f"global_batch_size is {self.global_batch_size}, the product is {product}")
        return self


class Steps(BaseModel):
    """Optimizer steps of a run; learning-rate schedule and warm-up count in these."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps_per_epoch: int = Field(ge=1)
    """Optimizer steps per pass over the rows; a last partial batch is a step too."""
    total_steps: int = Field(ge=1)
    """Optimizer steps of the whole run."""
    warmup_steps: int = Field(ge=0)
    """Optimizer steps in which the learning rate rises from zero."""


def batch_arithmetic(
    global_batch_size: int, world_size: int, per_device_train_batch_size: int | None = None
) -> Batch:
    """Spread a global batch over ranks.

    Args:
        global_batch_size: rows per optimizer step over all ranks.
        world_size: ranks over all nodes.
        per_device_train_batch_size: wished rows per rank and pass; kept where it divides the rank's share,
            else lowered to the share's largest divisor below it. Without a wish the largest divisor up to
            `DEFAULT_MICRO_BATCH` is taken. Accumulation takes the rest.

    Raises:
        Refused: if a number is not a positive whole number, or the global batch cannot be split evenly
            over the ranks; the message holds the nearest batches and GPU counts that can.
    """
    positive("global_batch_size", global_batch_size)
    positive("gpus", world_size)
    wish = DEFAULT_MICRO_BATCH
    if per_device_train_batch_size is not None:
        wish = positive("per_device_train_batch_size", per_device_train_batch_size)
    share, rest = divmod(global_batch_size, world_size)
    if rest:
        raise refuse(
            "BATCH002",
            "global_batch_size",
            f"{global_batch_size} rows per optimizer step cannot be split evenly over {ranks(world_size)}",
            f"use a global batch of {_nearest_batches(global_batch_size, world_size)}, "
            f"or {ranks(_nearest_worlds(global_batch_size, world_size))}",
        )
    micro = largest_divisor(share, wish)
    return Batch(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        world_size=world_size,
        global_batch_size=global_batch_size,
    )


def steps(
    rows: int,
    batch: Batch,
    num_train_epochs: float = 1.0,
    max_steps: int | None = None,
    warmup_ratio: float = 0.0,
) -> Steps:
    """Count optimizer steps the way transformers' `Trainer` does for a data set of known length.

    Args:
        rows: training rows (packed sequences when packing).
        batch: the batch arithmetic.
        num_train_epochs: passes over the rows; ignored when `max_steps` is given.
        max_steps: optimizer steps of the run.
        warmup_ratio: share of the optimizer steps used for warm-up, rounded up
            (`TrainingArguments.get_warmup_steps`, transformers 5.24).

    Raises:
        Refused: if there are no rows, or an argument is out of its range.
    """
    positive("rows", rows)
    if max_steps is not None:
        positive("max_steps", max_steps)
    if not num_train_epochs > 0 or not math.isfinite(num_train_epochs):
        raise refuse("BATCH001", "num_train_epochs", f"got {num_train_epochs!r}", "use a number above 0")
    if not 0 <= warmup_ratio <= 1:
        raise refuse("BATCH001", "warmup_ratio", f"got {warmup_ratio!r}", "use a share from 0 to 1")
    per_epoch = -(-rows // batch.global_batch_size)
    total = max_steps if max_steps is not None else math.ceil(num_train_epochs * per_epoch)
    return Steps(steps_per_epoch=per_epoch, total_steps=total, warmup_steps=math.ceil(total * warmup_ratio))


def count_nodes(world_size: int, ranks_per_node: int | None) -> tuple[int, int]:
    """Return nodes and ranks per node; all ranks are on one node when `ranks_per_node` is empty.

    Raises:
        Refused: if the ranks do not fill the nodes evenly.
    """
    local = world_size if ranks_per_node is None else positive("ranks_per_node", ranks_per_node)
    if world_size % local:
        message = f"{ranks(world_size)} do not fill nodes of {local}"
        raise refuse("BATCH003", "ranks_per_node", message, "use the same number of ranks on every node")
    return world_size // local, local


def divisors(number: int) -> list[int]:
    """Return the divisors of `number` in rising order."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is not above `limit` (at least 1)."""
    return max(d for d in divisors(number) if d <= limit)


def positive(field: str, value: object) -> int:
    """Return `value` if it is a positive whole number.

    Raises:
        Refused: naming `field` and what was found; text, booleans and fractions are not numbers here.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refuse("BATCH001", field, f"got {value!r}", "use a whole number >= 1")
    return value


def _nearest_batches(batch: int, world: int) -> str:
    """Return the global batches next to `batch` that `world` ranks can share, as text."""
    below = batch // world * world
    return f"{below} or {below + world}" if below else str(world)


def _nearest_worlds(batch: int, world: int) -> str:
    """Return the rank counts next to `world` that can share `batch`, as text."""
    able = divisors(batch)
    below = [d for d in able if d < world][-1:]
    above = [d for d in able if d > world][:1]
    return " or ".join(str(d) for d in below + above)
