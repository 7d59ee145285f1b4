"""The inverse question: the longest rows, the largest micro batch and the fewest GPUs that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from soup_flows.errors import refuse
from soup_flows.hardware import Hardware
from soup_flows.sharding.asked import World
from soup_flows.sharding.candidates import LEVELS, Case
from soup_flows.sharding.model import read_model_config
from soup_flows.sharding.plan import read_case
from soup_flows.sharding.values import Value
from soup_flows.spec import TrainingSpec

LONGEST = 1 << 20
"""Tokens beyond which no longer rows are looked for."""
LARGEST_MICRO_BATCH = 1024
MOST_NODES = 64


class FitPoint(Value):
    """Settings that fit, the least sharding first; memory in bytes of one rank."""

    gpus: int
    """GPUs over all machines."""
    max_length: int
    per_device_train_batch_size: int
    strategy: str
    gradient_checkpointing: bool
    required_bytes: int


class Fit(Value):
    """What fits; None where nothing does. Everything else is as asked, or chosen."""

    max_length: FitPoint | None
    """The longest rows, with the micro batch asked for, else 1."""
    per_device_train_batch_size: FitPoint | None
    """The largest micro batch at the length asked for; the global batch is not looked at."""
    gpus: FitPoint | None
    """The fewest GPUs like these, machines filled one after the other, with the micro batch asked for, else 1."""


def fit(spec: TrainingSpec, hardware: Hardware, nodes: int = 1) -> Fit:
    """Answer what fits on machines like `hardware`.

    Args:
        spec: what was asked; a strategy, micro batch and gradient checkpointing that were named are kept.
        hardware: one machine, imagined or real.
        nodes: machines, for the first two answers.

    Raises:
        Refused: as `make_plan` does; `PLAN022` where the model's shapes are not known.
    """
    config = read_model_config(spec.model) or {}
    case = read_case(spec, hardware, nodes)
    if case.model is None:
        raise refuse("PLAN022", "model", case.no_model, "give a folder with the model's config.json")
    micro, length = case.batch.micro or 1, spec.data.max_length
    positions = config.get("max_position_embeddings")
    longest = min(positions, LONGEST) if isinstance(positions, int) and positions >= 8 else LONGEST
    return Fit(
        max_length=_largest(lambda n: _first_that_fits(case, micro, n), longest),
        per_device_train_batch_size=_largest(
            lambda n: _first_that_fits(case, n, length), LARGEST_MICRO_BATCH
        ),
        gpus=_fewest(case, micro, length),
    )


def _first_that_fits(case: Case, micro: int, seq_len: int) -> FitPoint | None:
    """Return the least sharding that fits, without checkpointing before with it."""
    asked = case.spec.training.gradient_checkpointing
    strategies = [s for s in case.strategies() if case.named in (None, s[0]) and s[1] == case.world.size]
    for strategy, size in sorted(strategies, key=lambda s: LEVELS[s[0]]):
        for on in (False, True) if asked == "auto" else (asked,):
            estimate = case.predict(case.setup(strategy, size, micro, on, seq_len))
            if not case.shortages(estimate):
                return FitPoint(
                    gpus=size,
                    max_length=seq_len,
                    per_device_train_batch_size=micro,
                    strategy=strategy,
                    gradient_checkpointing=on,
                    required_bytes=case.required(estimate),
                )
    return None


def _largest(at: Callable[[int], FitPoint | None], most: int) -> FitPoint | None:
    """Return the answer for the largest number up to `most` that has one; memory grows with it."""
    best = at(1)
    low, high = 1, most
    while best is not None and low < high:
        middle = (low + high + 1) // 2
        found = at(middle)
        if found is None:
            high = middle - 1
        else:
            low, best = middle, found
    return best


def _fewest(case: Case, micro: int, seq_len: int) -> FitPoint | None:
    """Return the answer for the fewest GPUs: within one machine, then whole machines."""
    if case.world.device == "cpu":
        return None
    here = len(case.hardware.gpus)
    worlds = [(n, 1) for n in range(1, here + 1)] + [(here, nodes) for nodes in range(2, MOST_NODES + 1)]
    for ranks, nodes in worlds:
        if case.named == "single" and ranks * nodes > 1:
            return None
        if case.named == "ddp" and ranks * nodes == 1:
            continue
        world = World("cuda", ranks, nodes, "")
        if found := _first_that_fits(replace(case, world=world), micro, seq_len):
            return found
    return None
