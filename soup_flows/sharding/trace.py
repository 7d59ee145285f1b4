"""The predicted memory of a plan, checked by tracing the model's real code in a child process."""

from __future__ import annotations

import json
import subprocess
import sys

from soup_flows.hardware import Hardware
from soup_flows.json_text import parse_json
from soup_flows.memory.phases import WORKSPACE
from soup_flows.sharding.model import read_model_config
from soup_flows.sharding.plan import read_case
from soup_flows.sharding.values import ShardingPlan, Value
from soup_flows.spec import TrainingSpec
from soup_flows.units import gib

AGREE = 0.1
"""Difference up to which the prediction stands; beyond it the larger figure counts."""
TRACEABLE = ("single", "ddp", "full_shard", "shard_grad")


class Traced(Value):
    """What the trace found; `allocated_bytes` is None where nothing could be traced."""

    allocated_bytes: int | None
    """Peak of one rank by the trace."""
    predicted_bytes: int | None
    """Peak of one rank by the closed form."""
    taken_bytes: int | None
    """The one to rely on: the prediction where both agree within 10 %, else the larger."""
    fits: bool | None
    """Whether `taken_bytes` fits, with the same margin."""
    verdict: str
    """All of it in one sentence."""


def trace_plan(spec: TrainingSpec, hardware: Hardware, plan: ShardingPlan, timeout_s: float = 600) -> Traced:
    """Trace the chosen candidate of `plan` (seconds for small models, a minute for large ones; CPU only).

    Args:
        spec: what was asked.
        hardware: what the plan was made for.
        plan: the plan.
        timeout_s: seconds the child process may take.
    """
    config = read_model_config(spec.model)
    if plan.memory is None or config is None:
        return _nothing(plan, "the model's config.json is not on this machine")
    if plan.strategy not in TRACEABLE:
        why = (
            "DeepSpeed needs a real device"
            if plan.engine == "deepspeed"
            else "off-load and meshes are not followed"
        )
        return _nothing(plan, f"{plan.strategy} cannot be traced ({why})")
    if spec.training.method == "qlora" or spec.lora.use_dora or not spec.data.packing:
        return _nothing(plan, "only full training and plain LoRA of rows laid end to end are traced")
    case, batch = read_case(spec, hardware, plan.nodes), plan.batch
    setup = case.setup(
        plan.strategy, plan.world_size, batch.per_device_train_batch_size, plan.gradient_checkpointing
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "soup_flows.training.trace"],
            input=json.dumps({"config": config, "setup": setup.model_dump(mode="json")}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return _nothing(plan, f"the trace took more than {timeout_s:.0f} s")
    except subprocess.CalledProcessError as error:
        return _nothing(
            plan, f"the trace failed: {(error.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
    traced = parse_json(done.stdout)["allocated_bytes"] + WORKSPACE
    if plan.strategy == "ddp":
        traced += plan.memory.step["communication"]  # its buckets; the ranks do not talk in the trace
    return _compare(plan, traced)


def _nothing(plan: ShardingPlan, why: str) -> Traced:
    """Say why there is no trace; the prediction stands."""
    predicted = plan.memory.allocated_bytes if plan.memory else None
    fits = plan.chosen.fits if plan.chosen else None
    return Traced(
        allocated_bytes=None,
        predicted_bytes=predicted,
        taken_bytes=predicted,
        fits=fits,
        verdict=f"none: {why}",
    )


def _compare(plan: ShardingPlan, traced: int) -> Traced:
    """Hold the trace against the prediction."""
    assert plan.memory is not None
    assert plan.chosen is not None
    assert plan.room is not None
    predicted = plan.memory.allocated_bytes
    change = traced / predicted - 1
    agree = abs(change) <= AGREE
    taken = predicted if agree else max(predicted, traced)
    fits = plan.chosen.fits and plan.chosen.required_bytes * taken / predicted <= plan.room.device
    words = "they agree" if agree else f"they differ, so {gib(taken)} counts"
    return Traced(
        allocated_bytes=traced,
        predicted_bytes=predicted,
        taken_bytes=taken,
        fits=fits,
        verdict=f"{gib(traced)} against {gib(predicted)} predicted ({change:+.0%}); {words}, and "
        + ("it fits" if fits else "it does not fit"),
    )
