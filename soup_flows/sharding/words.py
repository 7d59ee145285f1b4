"""A plan in words: its values, each automatic one with its reason."""

from __future__ import annotations

from soup_flows.sharding.values import ShardingPlan

GIB = 1 << 30


def plan_rows(plan: ShardingPlan) -> list[tuple[str, object, str | None]]:
    """Return the plan's values, each automatic one with its reason."""
    batch, why = plan.batch, plan.reasons
    rows: list[tuple[str, object, str | None]] = [
        ("strategy", plan.strategy, plan.reason),
        ("ranks", f"{plan.world_size} × {plan.device}", why.get("world_size")),
        ("dtype", plan.dtype, why.get("dtype")),
        ("optimizer", plan.optimizer, why.get("optimizer")),
        (
            "gradient checkpointing",
            "on" if plan.gradient_checkpointing else "off",
            why.get("gradient_checkpointing"),
        ),
        (
            "rows per optimizer step",
            f"{batch.global_batch_size} = {batch.per_device_train_batch_size} per rank and pass "
            f"× {batch.gradient_accumulation_steps} passes × {batch.world_size} ranks",
            why.get("batch"),
        ),
        ("config", plan.config_source, None),
    ]
    if plan.memory is not None:
        rows.append(("memory of a rank", f"{plan.memory.allocated_bytes / GIB:.2f} GiB", why.get("memory")))
    if plan.steps is not None:
        counted = f"{plan.steps.total_steps}, of them {plan.steps.warmup_steps} warm-up"
        rows.append(("optimizer steps", counted, why.get("steps")))
    return rows


def plan_text(plan: ShardingPlan) -> str:
    """Return the plan for a terminal."""
    lines = [f"{name:<24} {value}" + (f"   ({why})" if why else "") for name, value, why in plan_rows(plan)]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])
