"""What the prediction forbids or warns of, as problems."""

from __future__ import annotations

from soup_flows.errors import Problem
from soup_flows.sharding.values import HOST_BOUND, Candidate, Room, ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.units import gib

SOURCE = "soup_flows.memory, docs/memory.md"


def memory_problems(spec: TrainingSpec, plan: ShardingPlan) -> list[Problem]:
    """Return what is wrong with the plan's memory: nothing where it fits or nothing was predicted.

    An error where the prediction is sound, or where even the lower end of its range does not fit; a warning
    otherwise, since off-loading, mixtures of experts and CPU ranks are upper bounds or barely measured.
    """
    chosen, estimate, room = plan.chosen, plan.memory, plan.room
    if chosen is None or estimate is None or room is None:
        return []
    found = []
    if not chosen.fits:
        hopeless = (
            estimate.low_bytes + estimate.context_bytes > room.device
            or estimate.host.step / HOST_BOUND > room.host
        )
        sure = plan.device == "cuda" and (estimate.confidence != "low" or hopeless)
        doubt = "" if sure else f" (an estimate of low confidence: {'; '.join(estimate.reasons)})"
        named = next((f for f in ("deepspeed_config", "deepspeed", "fsdp") if getattr(spec, f)), "strategy")
        found.append(
            Problem(
                id="PLAN020",
                severity="error" if sure else "warning",
                field=named,
                message=f"{chosen.label} on {plan.world_size} rank(s) {chosen.why_not}{doubt}",
                fix=_what_fits(plan, chosen, room),
                source=SOURCE,
            )
        )
    if estimate.host.load > room.host:
        one = plan.engine == "fsdp" or plan.strategy.startswith(("zero3", "zero++"))
        found.append(
            Problem(
                id="PLAN021",
                severity="warning",
                field="model",
                message=f"loading may take {gib(estimate.host.load)} of host memory, since "
                f"{'one rank reads' if one else 'every rank reads'} all weights, and {gib(room.host)} can be used",
                fix="use a machine with more memory"
                + ("" if one else ", or deepspeed=zero3 or fsdp=full_shard, where one rank reads"),
                source="soup_flows/training/model.py: DDP and ZeRO 1 and 2 load a whole copy on every rank",
            )
        )
    return found


def _what_fits(plan: ShardingPlan, chosen: Candidate, room: Room) -> str:
    """Name the nearest settings that fit: the same strategy, else the cheapest other."""
    able = sorted((c for c in plan.candidates if c.fits), key=lambda c: c.strategy != chosen.strategy)
    if able:
        return f"{_settings(able[0])} fits (needs {gib(able[0].required_bytes)} of {gib(room.device)})"
    least = min(plan.candidates, key=room.shortage)
    return (
        f"nothing fits here; the closest is {least.label}: {least.why_not}. Shorten data.max_length, train "
        "adapters (training.method=lora), or use more or larger GPUs: soup-flows plan --fit says how many"
    )


def _settings(candidate: Candidate) -> str:
    """Return the settings of a candidate as the user would write them."""
    name = candidate.strategy
    group = "strategy" if name in ("single", "ddp") else "deepspeed" if name.startswith("zero") else "fsdp"
    on = str(candidate.gradient_checkpointing).lower()
    return (
        f"{group}={name} training.per_device_train_batch_size={candidate.per_device_train_batch_size} "
        f"training.gradient_checkpointing={on}"
    )
