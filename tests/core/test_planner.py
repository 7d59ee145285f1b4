"""The planner: what it chooses, what it refuses, and that every choice has its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soup_flows.errors import Problem, Refused
from soup_flows.hardware import Hardware, RecordedProbe, detect, imagined
from soup_flows.memory import predict
from soup_flows.plan_page import fit_text, plan_page, plan_terminal
from soup_flows.sharding import ShardingPlan, make_plan, memory_problems
from soup_flows.sharding.fit import fit
from soup_flows.sharding.plan import read_case
from soup_flows.spec import TrainingSpec, parse_spec

MODELS = Path(__file__).parents[1] / "data" / "models"
RECORDED = Path(__file__).parents[1] / "data" / "hardware"
LORA = {"method": "lora"}


def ask(model: str, **values: Any) -> TrainingSpec:
    return parse_spec({"model": str(MODELS / model), "dataset": "d", **values})


def plan(model: str, hardware: Hardware, nodes: int = 1, **values: Any) -> ShardingPlan:
    return make_plan(ask(model, **values), hardware, 1000, nodes)


def found(model: str, hardware: Hardware, **values: Any) -> list[Problem]:
    spec = ask(model, **values)
    return memory_problems(spec, make_plan(spec, hardware, 1000))


def test_a_small_model_on_pcie_is_not_sharded() -> None:
    recorded = detect("auto", probe=RecordedProbe(RECORDED / "4xa100-pcie.json"), environ={})
    for machine in (recorded, imagined("rtx-4090", 4), imagined("h100", 8)):
        made = plan("qwen2-0.5b", machine)
        assert made.strategy == "ddp"
        assert made.world_size == len(machine.gpus)
        assert "least sharding that fits" in made.reason


def test_a_full_fine_tune_of_8b_shards_the_optimizer_and_keeps_the_weights_whole() -> None:
    made = plan("llama-8b", imagined("h100", 8))
    assert made.strategy in ("shard_grad", "zero1", "zero2")
    assert "ddp needs 175" in made.reason
    assert found("llama-8b", imagined("h100", 8)) == []


def test_adapters_of_8b_need_no_sharding_and_those_of_70b_do() -> None:
    assert plan("llama-8b", imagined("h100", 8), training=LORA).strategy == "ddp"
    made = plan("llama-70b", imagined("a100-80gb", 8), training=LORA)
    assert made.strategy in ("full_shard", "zero3")
    assert made.memory is not None
    assert made.memory.parameters == 70_553_706_496
    for row in made.candidates:
        if row.strategy in ("ddp", "zero1", "zero2", "shard_grad"):
            assert not row.fits
            assert "GiB" in row.why_not


def test_what_cannot_fit_is_refused_with_figures() -> None:
    card = imagined("rtx-4090", 1)
    for values in ({}, {"strategy": "single"}, {"deepspeed": "zero2_offload"}):
        (problem,) = [p for p in found("llama-8b", card, **values) if p.id == "PLAN020"]
        assert problem.severity == "error"
        assert problem.field == ("deepspeed" if "deepspeed" in values else "strategy")
        assert "23.4 GiB" in problem.message
        assert "lora" in problem.fix
    assert found("llama-8b", card, training=LORA) == []


def test_a_preset_that_is_named_is_kept_and_told_what_would_fit() -> None:
    values = {
        "deepspeed": "zero1",
        "training": {"per_device_train_batch_size": 8, "global_batch_size": 128},
        "data": {"max_length": 8192},
    }
    made = plan("llama-8b", imagined("h100", 8), **values)
    assert (made.strategy, made.batch.per_device_train_batch_size) == ("zero1", 8)
    (problem,) = found("llama-8b", imagined("h100", 8), **values)
    assert problem.severity == "error"
    assert "deepspeed=zero1 training.per_device_train_batch_size=4" in problem.fix


def test_an_upper_bound_only_warns() -> None:
    """Off-load is an upper bound: what only its upper end exceeds is let through with a warning."""
    roomy = imagined("rtx-4090", 1)
    need = plan("llama-8b", roomy, deepspeed="zero3_offload").memory
    assert need is not None
    host = roomy.host_memory.model_copy(update={"available_bytes": int(need.host.step / 1.2)})
    tight = roomy.model_copy(update={"host_memory": host})
    (problem,) = found("llama-8b", tight, deepspeed="zero3_offload")
    assert problem.severity == "warning"
    assert "low confidence" in problem.message


def test_checkpointing_and_micro_batch_follow_the_memory() -> None:
    long = {"data": {"max_length": 4096}}
    card = imagined("rtx-4090", 2)
    made = plan("llama-8b", card, training=LORA)
    assert made.gradient_checkpointing
    assert "without it" in made.reasons["gradient_checkpointing"]
    pinned = plan("llama-8b", card, training={**LORA, "gradient_checkpointing": False})
    assert not pinned.gradient_checkpointing
    assert pinned.reasons["gradient_checkpointing"] == "as asked"
    short = plan("qwen2-0.5b", card)
    assert (
        short.batch.per_device_train_batch_size
        > plan("qwen2-0.5b", card, **long).batch.per_device_train_batch_size
    )
    assert plan("qwen2-0.5b", card, **long).batch.global_batch_size == short.batch.global_batch_size == 16


def test_gpus_auto_leaves_those_idle_that_the_batch_cannot_use() -> None:
    made = plan("qwen2-0.5b", imagined("h100", 8), training={"global_batch_size": 12})
    assert made.world_size == 6
    assert "12 rows" in made.reasons["world_size"]
    with pytest.raises(Refused, match="cannot be split evenly"):
        plan("qwen2-0.5b", imagined("h100", 8), gpus=8, training={"global_batch_size": 12})


def test_several_nodes() -> None:
    made = plan(
        "llama-8b", imagined("h100", 8), nodes=2, fsdp="hybrid_shard", training={"global_batch_size": 32}
    )
    assert (made.world_size, made.nodes, made.ranks_per_node) == (16, 2, 8)
    assert made.parallelism == {"dp_replicate_size": 2, "dp_shard_size": 8}
    assert made.batch.world_size == 16


def test_a_retry_keeps_the_strategy_that_was_chosen() -> None:
    """Free memory may differ by then; the checkpoints of one strategy cannot be read by most others."""
    before = plan("llama-8b", imagined("h100", 8))
    spec, roomy = ask("llama-8b"), imagined("b200", 8)
    assert make_plan(spec, roomy).strategy != before.strategy
    again = make_plan(spec, roomy, kept=before)
    assert again.strategy == before.strategy
    assert "attempt before" in again.reason
    assert make_plan(ask("llama-8b", deepspeed="zero3"), roomy, kept=before).strategy == "zero3"


def test_without_a_config_the_plan_says_that_nothing_was_predicted() -> None:
    spec = parse_spec({"model": "someone/some-model", "dataset": "d"})
    made = make_plan(spec, imagined("h100", 8))
    assert (made.strategy, made.memory, made.candidates) == ("ddp", None, ())
    assert any("config.json" in note for note in made.notes)
    assert memory_problems(spec, made) == []


def test_cpu_ranks_stay_ddp() -> None:
    made = plan("qwen2-0.5b", detect("cpu"), device="cpu", gpus=2)
    assert (made.strategy, made.dtype, len({c.strategy for c in made.candidates})) == ("ddp", "fp32", 1)


def test_every_automatic_value_has_a_reason_of_one_sentence() -> None:
    for machine, values in (
        (imagined("h100", 8), {}),
        (imagined("a100", 8), {"training": LORA, "fsdp": "full_shard"}),
        (imagined("t4", 1), {"training": LORA}),
        (detect("cpu"), {"device": "cpu"}),
    ):
        made = plan("llama-8b", machine, **values)
        decided = {
            "strategy",
            "world_size",
            "dtype",
            "optimizer",
            "batch",
            "gradient_checkpointing",
            "steps",
            "memory",
        }
        assert set(made.reasons) == decided
        assert all(text and "\n" not in text and not text.endswith(".") for text in made.reasons.values())
        assert sum(c.chosen for c in made.candidates) == 1
        assert made.candidates[0].chosen
        assert all(c.why_not for c in made.candidates if not c.chosen)
        assert not made.candidates[0].why_not or not made.candidates[0].fits


def test_the_plan_and_its_pages() -> None:
    made = plan("llama-8b", imagined("h100", 8))
    assert ShardingPlan.model_validate_json(made.model_dump_json()) == made
    page, text = plan_page(made), plan_terminal(made)
    assert page.count("\n| ") >= len(made.candidates)
    assert "| > shard_grad |" in page
    assert "## Memory of one rank" in page
    assert made.reason in text


def test_the_prediction_is_of_this_training_program() -> None:
    """Rows end to end and a loss in pieces, or after the forward pass: what `Setup` is told, and what it changes."""
    case = read_case(ask("llama-8b", data={"max_length": 2048}), imagined("h100", 8))
    setup = case.setup("full_shard", 8, 2, False)
    assert (setup.attention, setup.loss, setup.loss_outside, setup.tokens) == ("rows", "pieces", True, 4096)
    outside = predict(case.shapes, setup=setup, loss="full")
    assert outside.phases["loss"] - predict(case.shapes, setup=setup).phases["loss"] > 4e8
    inside = predict(case.shapes, setup=setup, loss="full", loss_outside=False)
    assert inside.phases["loss"] - outside.phases["loss"] > 2e9
    for changes in (
        {"data": {"max_length": 2048, "packing": False}},
        {"training": {"method": "lora"}, "lora": {"target_modules": ["q_proj", "lm_head"]}},
    ):
        other = read_case(ask("llama-8b", **changes), imagined("h100", 8))
        assert other.setup("full_shard", 8, 2, False).loss == "full"
    old = read_case(ask("llama-8b"), imagined("t4", 2)).setup("ddp", 2, 1, False)
    assert old.attention == "eager"  # no fused kernel for grouped heads before compute capability 8.0


def test_fit_answers_the_inverse() -> None:
    machine = imagined("h100", 8)
    answer = fit(ask("llama-8b", gpus=8, training={"global_batch_size": 8}), machine)
    longest = answer.max_length
    assert longest is not None
    values = {
        "gpus": 8,
        "data": {"max_length": longest.max_length},
        "training": {"per_device_train_batch_size": 1, "global_batch_size": 8},
    }
    assert plan("llama-8b", machine, **values).candidates[0].fits
    values["data"] = {"max_length": longest.max_length + 64}
    assert not plan("llama-8b", machine, **values).candidates[0].fits
    fewest = fit(ask("llama-8b", fsdp="full_shard"), machine).gpus
    assert fewest is not None
    assert 2 <= fewest.gpus <= 8
    assert "fewest GPUs" in fit_text(answer)


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 512),
    gpus=st.integers(1, 8),
    nodes=st.integers(1, 4),
    micro=st.none() | st.integers(1, 16),
    preset=st.sampled_from([None, "zero2", "zero3"]),
)
def test_the_global_batch_is_kept_or_refused(
    total: int, gpus: int, nodes: int, micro: int | None, preset: str | None
) -> None:
    training = {"global_batch_size": total, "per_device_train_batch_size": micro}
    values: dict[str, Any] = {"gpus": gpus, "training": training, "deepspeed": preset}
    world = gpus * nodes
    if total % world:
        with pytest.raises(Refused, match="cannot be split evenly"):
            plan("qwen2-0.5b", imagined("h100", 8), nodes, **values)
        return
    made = plan("qwen2-0.5b", imagined("h100", 8), nodes, **values)
    batch = made.batch
    assert made.world_size == batch.world_size == world
    assert batch.global_batch_size == total
    assert micro is None or batch.per_device_train_batch_size <= micro
    for row in made.candidates:
        product = row.per_device_train_batch_size * row.gradient_accumulation_steps * row.world_size
        assert product == total
    if preset:
        assert made.config["train_batch_size"] == total
        assert made.config["train_micro_batch_size_per_gpu"] == batch.per_device_train_batch_size
    assert made.steps is not None
    assert made.steps.steps_per_epoch == -(-1000 // total)


def test_more_sharding_is_never_priced_below_its_traffic() -> None:
    made = plan("llama-8b", imagined("a100-80gb-pcie", 4), training={"global_batch_size": 64})
    cost = {
        (c.strategy, c.gradient_checkpointing): c.cost
        for c in made.candidates
        if c.per_device_train_batch_size == 1
    }
    assert cost["full_shard", False].communication > cost["shard_grad", False].communication
    assert cost["zero3_offload", False].offload > cost["zero2_offload", False].offload > 0
    assert cost["full_shard", True].recompute == pytest.approx(cost["full_shard", True].compute / 3)


def test_json_of_a_recorded_machine_plans_the_same(tmp_path: Path) -> None:
    machine = imagined("l40s", 2)
    again = Hardware.model_validate(json.loads(machine.model_dump_json()))
    assert plan("llama-8b", again, training=LORA) == plan("llama-8b", machine, training=LORA)


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ({"deepspeed": "zero2", "gpus": 2}, 1, True),
        ({"fsdp": "full_shard", "gpus": 2}, 1, True),
        ({"deepspeed": "zero2", "gpus": 1}, 2, True),
        ({"strategy": "ddp", "gpus": 2}, 1, False),
        ({"strategy": "single", "gpus": 1}, 2, False),
    ],
)
def test_what_one_rank_can_have_is_kept_when_gpus_are_lost(
    before: dict[str, Any], now: int, same: bool
) -> None:
    """Its checkpoints are read by another number of ranks; those of another strategy are not."""
    lora = {"method": "lora", "global_batch_size": 16}
    machine = imagined("a100-80gb", 2)
    kept = make_plan(ask("qwen2-0.5b", training=lora, **before), machine)
    after = make_plan(ask("qwen2-0.5b", training=lora, gpus=now), machine, kept=kept)
    assert after.world_size == now
    assert (after.strategy == kept.strategy) is same
