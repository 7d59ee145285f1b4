"""From what the user asked and what the machine has to one `ShardingPlan`."""

from __future__ import annotations

from dataclasses import dataclass

from soup_flows.batch import Batch, Steps, steps
from soup_flows.deepspeed import load_deepspeed_config
from soup_flows.errors import Refused
from soup_flows.hardware import Hardware
from soup_flows.memory import MemoryEstimate
from soup_flows.sharding.asked import (
    World,
    asked_batch,
    batch_numbers,
    check_method,
    decide_dtype,
    decide_optimizer,
    decide_world,
    named_strategy,
)
from soup_flows.sharding.candidates import Case, all_candidates
from soup_flows.sharding.choose import choose, why_checkpointing, why_micro_batch
from soup_flows.sharding.config import engine_config
from soup_flows.sharding.model import known_model
from soup_flows.sharding.values import Candidate, Correction, Room, ShardingPlan, engine_of
from soup_flows.spec import TrainingSpec
from soup_flows.units import gib

ALONE = ("single",)
"""Strategies of one rank only."""
NOT_ALONE = ("ddp", "hybrid_shard")
"""Strategies that one rank cannot have; the other sharded ones can, and so read their checkpoints."""


@dataclass
class Decision:
    """What was decided with or without a prediction, and the reasons."""

    strategy: str
    reason: str
    world: World
    micro_batch: int | None
    """None for the default without a prediction."""
    gradient_checkpointing: bool
    reasons: dict[str, str]
    notes: tuple[str, ...] = ()
    memory: MemoryEstimate | None = None
    room: Room | None = None
    candidates: tuple[Candidate, ...] = ()


def make_plan(
    spec: TrainingSpec,
    hardware: Hardware,
    rows: int | None = None,
    nodes: int = 1,
    kept: ShardingPlan | None = None,
    correction: Correction | None = None,
) -> ShardingPlan:
    """Resolve the sharding config of `spec` for `hardware`.

    Where the model's `config.json` is on this machine, the memory of every candidate strategy, micro batch
    and gradient checkpointing is predicted, and what was not named is chosen so that it fits. What was named
    is kept even if it does not fit; `memory_problems` says so.

    Args:
        spec: what the user asked; its `gpus` count for each node.
        hardware: the machine that will run it, or one of several like it.
        rows: training rows, when they are known; step counts follow from them.
        nodes: machines.
        kept: the plan of an attempt before this one; a strategy that was chosen is then not chosen anew, since
            the checkpoints of one strategy cannot be read by most others.
        correction: what earlier attempts measured; see `soup_flows.measured.recall`.

    Raises:
        Refused: with the field and the nearest valid value, for GPUs that are not there, batches that cannot
            be divided, configs that cannot be read, and settings that contradict each other.
    """
    case = read_case(spec, hardware, nodes, kept, correction)
    decision = _predicted(case) if case.model is not None else _unpredicted(case, case.no_model)
    world, strategy, asked = decision.world, decision.strategy, case.batch
    batch = asked.divided(world.size, decision.micro_batch)
    config, parallelism, notes = (
        (case.user_config, None, [])
        if case.user_config is not None
        else engine_config(spec, hardware, world, strategy, case.dtype, batch)
    )
    optimizer, optimizer_reason = decide_optimizer(spec, world.device, strategy)
    counts = _steps(spec, batch, rows)
    micro = f"micro batch {batch.per_device_train_batch_size}: {decision.reasons.pop('micro_batch')}"
    reasons = {
        "strategy": decision.reason,
        "world_size": world.reason,
        "dtype": case.dtype_reason,
        "optimizer": optimizer_reason,
        "batch": f"{asked.reason.format(world.size)}; {micro}",
        **decision.reasons,
    }
    if counts is not None:
        reasons["steps"] = f"{rows} rows, {counts.steps_per_epoch} steps an epoch"
    return ShardingPlan(
        strategy=strategy,
        engine=engine_of(strategy),
        device=world.device,
        world_size=world.size,
        nodes=world.nodes,
        dtype=case.dtype,
        optimizer=optimizer,
        gradient_checkpointing=decision.gradient_checkpointing,
        batch=batch,
        rows=rows,
        steps=counts,
        tokens_per_step=batch.global_batch_size * spec.data.max_length,
        config=config,
        parallelism=parallelism,
        config_source=spec.deepspeed_config or (f"preset {strategy}" if config else "no preset"),
        reason=decision.reason,
        reasons=reasons,
        notes=(*notes, *decision.notes),
        memory=decision.memory,
        correction=case.correction if decision.memory is not None else None,
        room=decision.room,
        candidates=decision.candidates,
    )


def read_case(
    spec: TrainingSpec,
    hardware: Hardware,
    nodes: int = 1,
    kept: ShardingPlan | None = None,
    correction: Correction | None = None,
) -> Case:
    """Collect what was asked, the machine and the model; see `make_plan`.

    Raises:
        Refused: as `make_plan` does.
    """
    user_config = load_deepspeed_config(spec.deepspeed_config) if spec.deepspeed_config else None
    free = not batch_numbers(user_config)
    world = decide_world(spec, hardware, nodes, spec.training.global_batch_size if free else None)
    dtype, dtype_reason = decide_dtype(spec, hardware, world.device)
    named, named_reason = named_strategy(spec, world.size, user_config)
    if named is None and kept is not None:
        if kept.strategy == "single" and world.auto:
            world = World(world.device, 1, 1, kept.reasons.get("world_size", world.reason))
        if kept.strategy not in (NOT_ALONE if world.size == 1 else ALONE):
            named, named_reason = kept.strategy, "kept from the attempt before, whose checkpoints it can read"
    check_method(spec, named, world.device)
    asked = asked_batch(spec, world.size, user_config)
    asked.divided(world.size)  # refused here if the rows cannot be split evenly
    model, no_model = known_model(spec.model)
    if spec.compares_answers:
        model, no_model = None, f"memory was not predicted: nothing is known of the task {spec.training.task}"
    return Case(
        spec,
        hardware,
        world,
        dtype,
        dtype_reason,
        model,
        no_model,
        asked,
        named,
        named_reason,
        user_config,
        correction,
    )


def _predicted(case: Case) -> Decision:
    """Choose among candidates whose memory is predicted."""
    try:
        table, reason = choose(case, all_candidates(case))
    except Refused as refused:  # an adapter target that names no module: for the validation to report
        return _unpredicted(case, f"memory was not predicted: {refused.problems[0].message}")
    best, world = table[0], case.world
    if best.world_size < world.size:
        why = f"1 of {len(case.hardware.gpus)} visible GPU(s): {reason}"
        world = World(world.device, 1, 1, why)
    micro, on = best.per_device_train_batch_size, best.gradient_checkpointing
    estimate = case.predict(case.setup(best.strategy, best.world_size, micro, on))
    peak = f"{gib(estimate.allocated_bytes)} at the peak ({estimate.peak_phase})"
    notes = case.rate.notes + case.shapes.notes
    if case.correction is not None:
        notes += (f"the predicted memory is corrected: {case.correction.reason}",)
    if estimate.host.load > case.room.host:
        notes += (
            f"loading may take {gib(estimate.host.load)} of host memory, and {gib(case.room.host)} can be used",
        )
    return Decision(
        strategy=best.strategy,
        reason=reason,
        world=world,
        micro_batch=micro,
        gradient_checkpointing=on,
        reasons={
            "micro_batch": why_micro_batch(case, table),
            "gradient_checkpointing": why_checkpointing(case, table),
            "memory": f"{peak}, {estimate.confidence} confidence: {'; '.join(estimate.reasons)}",
        },
        notes=notes,
        memory=estimate,
        room=case.room,
        candidates=table,
    )


def _unpredicted(case: Case, note: str) -> Decision:
    """Decide without knowing the model: what was named, else no sharding."""
    several = case.world.size > 1
    checkpointing = case.spec.training.gradient_checkpointing is True
    plain = (
        "several ranks, and no prediction that asks for sharding" if several else "one rank shards nothing"
    )
    return Decision(
        strategy=case.named or ("ddp" if several else "single"),
        reason=case.named_reason or plain,
        world=case.world,
        micro_batch=None,
        gradient_checkpointing=checkpointing,
        reasons={
            "micro_batch": "the largest considered that divides a rank's share",
            "gradient_checkpointing": "off unless a prediction asks for it"
            if case.spec.training.gradient_checkpointing == "auto"
            else "as asked",
        },
        notes=(note,),
    )


def _steps(spec: TrainingSpec, batch: Batch, rows: int | None) -> Steps | None:
    """Count the optimizer steps, where the rows are known."""
    train = spec.training
    if rows is None:
        return None
    return steps(rows, batch, train.num_train_epochs, train.max_steps, train.warmup_ratio)
