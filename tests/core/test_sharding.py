"""The plan: world, dtype, batches and configs, and what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soup_flows.errors import Refused
from soup_flows.hardware import Hardware, RecordedProbe, detect
from soup_flows.sharding import ShardingPlan, make_plan
from soup_flows.spec import parse_spec

RECORDED = Path(__file__).parents[1] / "data" / "hardware"


def machine(name: str) -> Hardware:
    return detect("auto", probe=RecordedProbe(RECORDED / f"{name}.json"), environ={})


def plan(machine_name: str = "8xh100-nvswitch", rows: int | None = 1000, **values: Any) -> ShardingPlan:
    spec = parse_spec({"model": "m", "dataset": "d", **values})
    hardware = detect("cpu") if spec.device == "cpu" else machine(machine_name)
    return make_plan(spec, hardware, rows)


def refused(**values: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        plan(**values)
    return caught.value


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero++"])
def test_deepspeed_batch_keys_hold_for_any_world(preset: str, gpus: int) -> None:
    made = plan(deepspeed=preset, gpus=gpus, training={"global_batch_size": 48})
    config = made.config
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * gpus
    assert config["train_batch_size"] == product == made.batch.global_batch_size == 48
    assert config["bf16"]["enabled"] is True
    assert config["gradient_clipping"] == 1.0
    assert made.steps is not None
    assert (made.steps.steps_per_epoch, made.steps.total_steps) == (21, 21)


@pytest.mark.parametrize("preset", ["full_shard", "shard_grad", "full_offload"])
def test_fsdp_config_is_fsdp2(preset: str) -> None:
    config = plan(fsdp=preset, gpus=4).config
    assert config["version"] == 2
    assert config["reshard_after_forward"] is (preset != "shard_grad")
    assert config["cpu_offload"] is (preset == "full_offload")
    assert "activation_checkpointing" not in config


def test_dtype_follows_the_gpus() -> None:
    assert plan("8xh100-nvswitch").dtype == "bf16"
    assert plan("t4", gpus=1).dtype == "fp16"
    assert plan(device="cpu", gpus=2).dtype == "fp32"
    assert "compute capability" in plan("t4", gpus=1).reasons["dtype"]
    assert (
        refused(machine_name="t4", gpus=1, training={"dtype": "bf16"}).problems[0].field == "training.dtype"
    )


def test_strategy_without_a_preset() -> None:
    assert plan(gpus=1).strategy == "single"
    assert plan(gpus=4).engine == "ddp"
    assert refused(gpus=1, strategy="ddp").problems[0].field == "strategy"
    assert refused(gpus=2, strategy="single").problems[0].field == "strategy"


def test_gpus_that_are_not_there() -> None:
    assert "8 can be seen" in str(refused(gpus=9))
    no_gpu = make_error(detect("cpu"), gpus=2)
    assert no_gpu.problems[0].field == "gpus"
    assert "device=cpu" in str(no_gpu)


def make_error(hardware: Hardware, **values: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        make_plan(parse_spec({"model": "m", "dataset": "d", **values}), hardware)
    return caught.value


def test_an_impossible_batch_names_possible_ones() -> None:
    text = str(refused(gpus=8, training={"global_batch_size": 12}))
    assert "8 or 16" in text


def test_a_users_json_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    mine = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
    }
    file.write_text(json.dumps(mine))
    made = plan(deepspeed_config=str(file), gpus=4)
    assert made.config == mine
    assert made.strategy == "zero3_offload"
    assert made.batch.model_dump() == {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "world_size": 4,
        "global_batch_size": 64,
    }
    assert "train_batch_size=64" in made.reasons["batch"]
    assert refused(deepspeed_config=str(file), gpus=8).problems[0].field == "deepspeed_config"


def own_json(tmp_path: Path, text: str) -> dict[str, Any]:
    file = tmp_path / "own.json"
    file.write_text(text)
    return {"deepspeed_config": str(file), "gpus": 4}


ODD = ["[]", "{}", "null", "true", '"x"', "-1", "1e999", "[[1]]", "1" + "0" * 400]
READ_BY_THE_PLANNER = [
    '{"zero_optimization": @}',
    '{"zero_optimization": {"stage": @}}',
    '{"zero_optimization": {"stage": 3, "offload_param": @}}',
    '{"zero_optimization": {"stage": 3, "offload_param": {"device": @}}}',
    '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": @}}}',
    '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": @}}',
    '{"zero_optimization": {"stage": 3, "reduce_bucket_size": @}}',
    '{"zero_optimization": {"stage": 3}, "train_batch_size": @}',
    '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": @}',
    '{"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": @}',
    '{"zero_optimization": {"stage": 3}, "optimizer": @}',
]


@pytest.mark.parametrize("text", READ_BY_THE_PLANNER)
def test_no_value_of_a_users_json_breaks_the_planner(text: str, tmp_path: Path) -> None:
    for value in ODD:
        try:
            made = plan(**own_json(tmp_path, text.replace("@", value)))
        except Refused:
            continue
        assert made.strategy in ("zero2", "zero3")
        assert made.batch.global_batch_size == 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "there is no zero_optimization block"),
        ('{"zero_optimization": [1]}', "zero_optimization is [1] and not a block"),
        ('{"zero_optimization": {}}', "has no stage"),
        ('{"zero_optimization": {"stage": 0}}', "stage is 0, so nothing would be sharded"),
        ('{"zero_optimization": {"stage": "three"}}', "stage is 'three', and there is no such stage"),
        ('{"zero_optimization": {"stage": 9}}', "stage is 9, and there is no such stage"),
        ('{"zero_optimization": {"stage": true}}', "stage is True, and there is no such stage"),
    ],
)
def test_a_json_without_a_stage_is_told_what_is_there(text: str, words: str, tmp_path: Path) -> None:
    found = refused(**own_json(tmp_path, text)).problems
    assert [problem.id for problem in found] == ["PLAN007"]
    assert words in found[0].message


def test_a_batch_that_cannot_be_split_names_the_setting(tmp_path: Path) -> None:
    (asked,) = refused(gpus=3, training={"global_batch_size": 2}).problems
    assert (asked.id, asked.field) == ("BATCH002", "training.global_batch_size")
    assert asked.fix.endswith("or 2 ranks")
    (one,) = refused(gpus=2, training={"global_batch_size": 5}).problems
    assert "or 1 or 5 ranks" in one.fix
    (alone,) = refused(gpus=2, training={"global_batch_size": 1}).problems
    assert alone.fix.endswith("or 1 rank")
    text = '{"zero_optimization": {"stage": 2}, "train_batch_size": 6}'
    (own,) = refused(**own_json(tmp_path, text)).problems
    assert (own.id, own.field) == ("BATCH002", "deepspeed_config.train_batch_size")


def test_the_plan_survives_json() -> None:
    made = plan(deepspeed="zero3", gpus=4)
    assert ShardingPlan.model_validate_json(made.model_dump_json()) == made
