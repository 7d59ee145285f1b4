"""What must be true of a run's ranks, as values, and the comparison with the plan.

Sharding that silently became replication trains well and wastes every GPU but one; it shows in nothing but the
number of elements each rank holds. So they are counted, after the first optimizer step, on every rank.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from soup_flows.sharding import ShardingPlan

SLACK = 0.02
"""Share by which a shard may exceed its part: ZeRO pads every tensor and buffer to the world size."""


class RankProof(BaseModel):
    """What one rank holds after the first optimizer step. Counts are elements, not bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    host: str
    pid: int
    device: str
    wrapper: str
    """Class that wraps the model."""
    zero_stage: int
    """Stage the DeepSpeed engine reports; 0 without DeepSpeed."""
    optimizer: str
    """Class of the innermost optimizer."""
    parameters_total: int
    parameters_held: int
    trainable_total: int
    optimizer_held: int
    """Elements of the first Adam moment on this rank."""
    slack: int
    """Elements a shard may hold beyond its part: padding of ZeRO, uneven rows of FSDP."""
    dtypes: dict[str, int]
    """Elements held by dtype."""
    step: int


class Proof(BaseModel):
    """The proof of a run: the ranks' rows, and what does not hold (nothing, for a good run)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    world_size: int
    ranks: tuple[RankProof, ...]
    failures: tuple[str, ...] = ()


def check(world_size: int, ranks: tuple[RankProof, ...], plan: ShardingPlan) -> list[str]:
    """Return one sentence for everything in which the ranks differ from the plan."""
    failures = []
    if world_size != plan.world_size or len({row.pid for row in ranks}) != plan.world_size:
        failures.append(f"{world_size} rank(s) formed a group, {plan.world_size} were planned")
    wrapper = {
        "deepspeed": "DeepSpeedEngine",
        "fsdp": "FSDPModule",
        "ddp": "DistributedDataParallel",
        "single": "none",
    }
    stage = int(plan.strategy[4]) if plan.engine == "deepspeed" and plan.strategy[4].isdecimal() else 0
    stage = 3 if plan.strategy == "zero++" else stage
    shards_parameters = stage == 3 or plan.engine == "fsdp"
    shards_optimizer = stage >= 1 or plan.engine == "fsdp"
    for row in ranks:
        where = f"rank {row.rank}"
        if row.wrapper != wrapper[plan.engine]:
            failures.append(f"{where}: {row.wrapper} wraps the model, {wrapper[plan.engine]} was planned")
        if row.zero_stage != stage:
            failures.append(f"{where}: ZeRO stage {row.zero_stage} runs, stage {stage} was planned")
        failures += _share(
            f"{where}: parameters", row.parameters_held, row.parameters_total, row, shards_parameters, plan
        )
        failures += _share(
            f"{where}: optimizer state", row.optimizer_held, row.trainable_total, row, shards_optimizer, plan
        )
        if row.trainable_total == 0:
            failures.append(f"{where}: nothing is trainable")
    for name, held, whole in (
        ("parameters", sum(r.parameters_held for r in ranks), ranks[0].parameters_total),
        ("optimizer state", sum(r.optimizer_held for r in ranks), ranks[0].trainable_total),
    ):
        if held < whole:
            failures.append(f"all ranks together hold {held:,} elements of the {name}, {whole:,} are needed")
    return failures


def _share(what: str, held: int, whole: int, row: RankProof, sharded: bool, plan: ShardingPlan) -> list[str]:
    """Check that a rank holds its part of `whole`, with room for padding, or all of it when not sharded."""
    part = whole / plan.ranks_per_node if plan.strategy == "hybrid_shard" else whole / plan.world_size
    expected = part if sharded else whole
    most = expected * (1 + SLACK) + row.slack if sharded else expected
    if held > most or (not sharded and held < whole):
        wanted = f"{'about ' if sharded else ''}{expected:,.0f}"
        return [f"{what}: holds {held:,} of {whole:,} elements, planned {wanted}"]
    return []
