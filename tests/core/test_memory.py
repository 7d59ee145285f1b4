"""The closed form: its arithmetic, its refusals, its monotonicity."""

import itertools
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soup_flows.architecture import Architecture, from_config
from soup_flows.errors import Refused
from soup_flows.memory import MemoryEstimate, Setup, predict
from soup_flows.memory.setup import Loss, Optimizer, Strategy

GIB = 1 << 30


def llama(layers: int = 32, **changes: object) -> Architecture:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    return from_config(config | changes)


LLAMA_8B = llama()
MIXTRAL = from_config(
    {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "num_local_experts": 8,
    }
)


def states(**settings: object) -> float:
    """Bytes per parameter of what rests between steps."""
    step = predict(LLAMA_8B, seq_len=1, **settings).step
    names = ("weights", "master_weights", "gradients", "optimizer")
    return sum(step[name] for name in names) / LLAMA_8B.parameters


@pytest.mark.parametrize(
    ("settings", "bytes_per_parameter"),
    [
        ({}, 16),
        ({"dtype": "fp32"}, 16),
        ({"master_weights": False}, 8),
        ({"strategy": "zero1", "world_size": 4}, 2 + 2 + 12 / 4),
        ({"strategy": "zero2", "world_size": 4}, 2 + 14 / 4),
        ({"strategy": "zero3", "world_size": 4}, 16 / 4),
        ({"strategy": "zero2_offload", "world_size": 4}, 2),
        ({"strategy": "zero3_offload", "world_size": 4}, 0),
        ({"strategy": "full_offload", "world_size": 4}, 0),
        ({"strategy": "hybrid_shard", "world_size": 16, "ranks_per_node": 8}, 16 / 8),
        ({"optimizer": "adamw_8bit"}, 10.06),
        ({"optimizer": "sgd"}, 8),
    ],
)
def test_states_are_the_textbook_bytes(settings: dict, bytes_per_parameter: float) -> None:
    if settings.get("strategy") in ("hybrid_shard", "zero3", "zero3_offload"):
        settings = {**settings, "gradient_accumulation_steps": 2}  # so that gradients are alive at the peak
    assert states(**settings) == pytest.approx(bytes_per_parameter, rel=0.01, abs=0.01)


def test_ddp_keeps_buckets_as_large_as_its_gradients() -> None:
    one, two = predict(LLAMA_8B), predict(LLAMA_8B, strategy="ddp", world_size=2)
    assert two.allocated_bytes - one.allocated_bytes == pytest.approx(4 * LLAMA_8B.parameters, rel=1e-6)


def test_offloaded_state_appears_on_the_host_or_on_nvme() -> None:
    count = LLAMA_8B.parameters
    cpu = predict(LLAMA_8B, strategy="zero3_offload", world_size=8)
    disk = predict(LLAMA_8B, strategy="zero3_nvme", world_size=8)
    assert cpu.host.step == pytest.approx(1.5 * 18 * count, rel=0.01)
    assert cpu.host.nvme == 0
    assert disk.host.nvme == pytest.approx(18 * count, rel=0.01)
    assert disk.host.step < cpu.host.step / 5
    two_nodes = predict(LLAMA_8B, strategy="zero3_offload", world_size=8, ranks_per_node=4)
    assert two_nodes.host.step == pytest.approx(cpu.host.step / 2, rel=0.01)


def test_loading_reads_a_copy_per_rank_except_where_one_rank_reads() -> None:
    count = LLAMA_8B.parameters
    assert predict(LLAMA_8B, strategy="ddp", world_size=8).host.load == 8 * 4 * count
    assert predict(LLAMA_8B, strategy="full_shard", world_size=8).host.load == 4 * count
    assert predict(LLAMA_8B, strategy="zero2", world_size=8).host.load == 8 * 2 * count
    assert predict(LLAMA_8B, strategy="zero3", world_size=8).host.load == 2 * count
    assert predict(LLAMA_8B, strategy="zero3", world_size=8).load_bytes < 7 * GIB + count


def test_lora_trains_few_parameters_and_keeps_16_bit_weights() -> None:
    found = predict(LLAMA_8B, method="lora", lora_r=16, lora_targets=("q_proj", "v_proj"))
    assert found.trained_parameters == 32 * 16 * (4096 + 4096 + 4096 + 1024)
    assert found.step["weights"] == pytest.approx(
        2 * LLAMA_8B.parameters + 4 * found.trained_parameters, rel=1e-6
    )
    small = predict(LLAMA_8B, method="qlora")
    assert small.step["weights"] < 0.45 * found.step["weights"]


@pytest.mark.parametrize(
    ("settings", "word", "reason"),
    [
        ({}, "high", "Llama-like"),
        ({"strategy": "zero3", "world_size": 8}, "medium", "ZeRO"),
        ({"method": "qlora"}, "medium", "quantised"),
        ({"strategy": "full_offload", "world_size": 8}, "low", "upper bound"),
        ({"compile": True}, "low", "compile"),
        ({"gradient_checkpointing": "selective"}, "low", "selective"),
        ({"optimizer": "paged_adamw_8bit"}, "low", "optimizer"),
    ],
)
def test_confidence_says_what_is_not_covered(settings: dict, word: str, reason: str) -> None:
    found = predict(LLAMA_8B, **settings)
    assert found.confidence == word
    assert any(reason in text for text in found.reasons)


def test_experts_mean_low_confidence() -> None:
    found = predict(MIXTRAL, method="lora", lora_targets=("q_proj", "v_proj"))
    assert found.confidence == "low"
    assert "experts" in found.reasons[0]


def test_every_combination_has_an_answer() -> None:
    names = typing.get_args(Strategy)
    axes = itertools.product(
        ("full", "lora", "qlora"),
        names,
        ("bf16", "fp16", "fp32"),
        (True, False, "selective"),
        typing.get_args(Loss),
    )
    for method, strategy, dtype, checkpointing, loss in axes:
        found = predict(
            MIXTRAL,
            method=method,
            strategy=strategy,
            world_size=1 if strategy == "single" else 8,
            dtype=dtype,
            gradient_checkpointing=checkpointing,
            loss=loss,
        )
        assert 0 < found.low_bytes <= found.allocated_bytes <= found.high_bytes
        assert found.allocated_bytes <= found.minimum_bytes <= found.required_bytes
        assert all(size >= 0 for size in (*found.step.values(), *found.load.values()))
        assert found.allocated_bytes == found.phases[found.peak_phase] == max(found.phases.values())
        assert sum(found.step.values()) == pytest.approx(found.allocated_bytes, abs=20)


@settings(deadline=None, max_examples=150)
@given(
    strategy=st.sampled_from([s for s in typing.get_args(Strategy) if s != "single"]),
    method=st.sampled_from(["full", "lora", "qlora"]),
    optimizer=st.sampled_from(typing.get_args(Optimizer)),
    world=st.sampled_from([2, 4, 8, 64]),
    rows=st.integers(1, 64),
    length=st.integers(1, 200_000),
    more=st.integers(2, 8),
)
def test_more_work_never_needs_less_memory(
    strategy: str, method: str, optimizer: str, world: int, rows: int, length: int, more: int
) -> None:
    base = {
        "strategy": strategy,
        "method": method,
        "optimizer": optimizer,
        "world_size": world,
        "per_device_train_batch_size": rows,
        "seq_len": length,
    }
    one = predict(LLAMA_8B, **base)
    assert predict(LLAMA_8B, **base | {"seq_len": more * length}).allocated_bytes >= one.allocated_bytes
    assert predict(LLAMA_8B, **base | {"world_size": more * world}).allocated_bytes <= one.allocated_bytes
    assert predict(LLAMA_8B, **base, gradient_accumulation_steps=more).allocated_bytes >= one.allocated_bytes
    assert predict(llama(40), **base).allocated_bytes >= one.allocated_bytes
    saved = predict(LLAMA_8B, **base, gradient_checkpointing=True)
    assert saved.phases["loss"] <= one.phases["loss"]


def test_sharding_order_for_one_model() -> None:
    chosen = {"world_size": 8, "gradient_checkpointing": True}
    sizes = [
        predict(LLAMA_8B, strategy=name, **chosen).allocated_bytes
        for name in ("ddp", "zero1", "zero2", "zero3", "zero3_offload")
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(Refused) as refused:
        predict(LLAMA_8B, strategy="full_shards", world_sizes=2, seq_len=0, optimizer="adamw_torch_fuse")
    fixes = {problem.field: problem.fix for problem in refused.value.problems}
    assert set(fixes) == {"strategy", "world_sizes", "seq_len", "optimizer"}
    assert "full_shard" in fixes["strategy"]
    assert "world_size" in fixes["world_sizes"]
    assert "adamw_torch_fused" in fixes["optimizer"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"world_size": 2}, "single"),
        ({"strategy": "ddp", "world_size": 6, "ranks_per_node": 4}, "multiple of ranks_per_node"),
        ({"method": "lora", "lora_targets": ("q_prj",)}, "q_proj"),
    ],
)
def test_impossible_setups_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(Refused, match=words):
        predict(LLAMA_8B, **settings)


def test_an_estimate_survives_json_and_a_setup_can_be_changed() -> None:
    setup = Setup(strategy="full_shard", world_size=8)
    found = predict(LLAMA_8B, setup=setup)
    assert MemoryEstimate.model_validate_json(found.model_dump_json()) == found
    assert predict(LLAMA_8B, setup=setup, world_size=16).allocated_bytes < found.allocated_bytes
    assert found.fits(80 * GIB)
    assert not found.fits(found.minimum_bytes - 1)


def test_the_loss_in_pieces_never_holds_all_logits() -> None:
    def at_loss(loss: Loss, seq_len: int, method: str = "full") -> int:
        return predict(LLAMA_8B, loss=loss, seq_len=seq_len, method=method).phases["loss"]

    vocab, hidden = LLAMA_8B.vocab_size, LLAMA_8B.hidden_size
    whole, piece = 12 * 8192 * vocab, 8 * 2**26
    assert at_loss("full", 8192, "lora") - at_loss("pieces", 8192, "lora") == pytest.approx(
        whole - piece, rel=0.01
    )
    head = 4 * vocab * hidden  # its gradient, in fp32
    product = 2 * 2**26 + 2 * vocab * hidden  # a piece's share of it, more than the piece itself takes
    saved = at_loss("full", 8192) - at_loss("pieces", 8192)
    assert saved == pytest.approx(whole - head - product, rel=0.01)
    few = hidden // 3  # a head's gradient would take more than their logits
    assert at_loss("full", few) == at_loss("pieces", few)
