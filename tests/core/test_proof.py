"""What the ranks hold is compared with the plan: every lie is named, the truth passes."""

from __future__ import annotations

from typing import Any

import pytest

from soup_flows.hardware import detect
from soup_flows.proof import RankProof, check
from soup_flows.sharding import make_plan
from soup_flows.spec import parse_spec

TOTAL = 1_000_000
WRAPPER = {
    "deepspeed": "DeepSpeedEngine",
    "fsdp": "FSDPModule",
    "ddp": "DistributedDataParallel",
    "single": "none",
}
PRESETS = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"deepspeed": "zero1"},
    "zero2": {"deepspeed": "zero2"},
    "zero3": {"deepspeed": "zero3"},
    "full_shard": {"fsdp": "full_shard"},
    "shard_grad": {"fsdp": "shard_grad"},
}
STAGE = {"zero1": 1, "zero2": 2, "zero3": 3}


def checked(preset: str, ranks: int = 4, **changes: Any) -> list[str]:
    """Check four honest ranks, with `changes` made to each of them."""
    values = {"model": "m", "dataset": "d", "gpus": 4, "device": "cpu", **PRESETS[preset]}
    plan = make_plan(parse_spec(values), detect("cpu"))
    sharded = preset in ("zero3", "full_shard", "shard_grad")
    honest = {
        "wrapper": WRAPPER[plan.engine],
        "zero_stage": STAGE.get(preset, 0),
        "parameters_held": TOTAL // 4 if sharded else TOTAL,
        "optimizer_held": TOTAL if preset == "ddp" else TOTAL // 4,
        "trainable_total": TOTAL,
    }
    rows = tuple(
        RankProof(
            rank=rank,
            host="h",
            pid=100 + rank,
            device="cpu",
            optimizer="AdamW",
            parameters_total=TOTAL,
            slack=400,
            dtypes={"float32": 1},
            step=1,
            **(honest | changes),
        )
        for rank in range(ranks)
    )
    return check(ranks, rows, plan)


@pytest.mark.parametrize("preset", PRESETS)
def test_honest_ranks_pass(preset: str) -> None:
    assert checked(preset) == []


@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3", "full_shard", "shard_grad"])
def test_replication_is_not_sharding(preset: str) -> None:
    failures = checked(
        preset, wrapper="DistributedDataParallel", zero_stage=0, optimizer_held=TOTAL, parameters_held=TOTAL
    )
    assert any("DistributedDataParallel wraps the model" in failure for failure in failures)
    assert any("optimizer state: holds" in failure for failure in failures)


@pytest.mark.parametrize("preset", ["zero3", "full_shard"])
def test_whole_parameters_are_no_shards(preset: str) -> None:
    assert any("parameters: holds" in failure for failure in checked(preset, parameters_held=TOTAL))


def test_padding_is_allowed_for() -> None:
    assert checked("zero3", parameters_held=TOTAL // 4 + 300) == []


def test_too_few_elements_are_a_hole() -> None:
    assert any("are needed" in failure for failure in checked("zero3", parameters_held=TOTAL // 8))


def test_another_stage_is_named() -> None:
    assert any("stage 1 runs, stage 2" in failure for failure in checked("zero2", zero_stage=1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_fewer_ranks_than_planned(ranks: int) -> None:
    failures = checked("ddp", ranks=ranks)
    assert f"{ranks} rank(s) formed a group, 4 were planned" in failures


def test_nothing_trainable() -> None:
    assert any(
        "nothing is trainable" in failure for failure in checked("ddp", trainable_total=0, optimizer_held=0)
    )
