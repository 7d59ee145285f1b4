"""The closed form agrees with traces of the real model code."""

import pytest

from soup_flows.architecture import Architecture, from_config
from soup_flows.memory import predict

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
SHARDED = {"strategy": "full_shard", "world_size": 8}
CHECKPOINTED = {"gradient_checkpointing": True}

# Peak allocated bytes (GiB) of two steps of the real transformers 5.24 code under FakeTensorMode with a fake
# process group (torch 2.13), counted storage by storage. They taught rules; no constant was fitted to them.
TRACES = {
    "single, fp32 weights under autocast, checkpointed": (29.477, llama(4), {**CHECKPOINTED}),
    "single, fp32 weights under autocast": (29.082, llama(4), {"seq_len": 2048}),
    "single, pure bf16, multi-tensor AdamW": (
        20.121,
        llama(4),
        {"master_weights": False, "optimizer": "adamw_torch"},
    ),
    "LoRA": (13.154, llama(4), {"method": "lora"}),
    "LoRA, chunks, checkpointed": (
        6.806,
        llama(4),
        {**CHECKPOINTED, "method": "lora", "seq_len": 8192, "loss": "liger", "fused_kernels": False},
    ),
    "FSDP2, checkpointed": (8.116, llama(4), {**CHECKPOINTED, **SHARDED, "seq_len": 2048}),
    "FSDP2": (14.425, llama(4), {**SHARDED}),
    "FSDP2, chunks, fp32 reduction": (
        10.002,
        llama(4),
        {
            **CHECKPOINTED,
            **SHARDED,
            "seq_len": 8192,
            "loss": "liger",
            "fused_kernels": False,
            "reduce_fp32": True,
        },
    ),
    "FSDP2 without resharding": (
        9.335,
        llama(4),
        {**CHECKPOINTED, **SHARDED, "seq_len": 2048, "strategy": "shard_grad"},
    ),
    "FSDP2, two micro batches": (
        18.255,
        llama(4),
        {
            **CHECKPOINTED,
            **SHARDED,
            "seq_len": 8192,
            "gradient_accumulation_steps": 2,
            "reduce_fp32": True,
        },
    ),
    "tied, large vocabulary": (
        10.735,
        llama(
            4,
            model_type="qwen2",
            hidden_size=896,
            intermediate_size=4864,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=151936,
            tie_word_embeddings=True,
        ),
        {},
    ),
    "8B on 8 ranks, root unit": (
        20.3,
        LLAMA_8B,
        {**CHECKPOINTED, **SHARDED, "seq_len": 2048, "reduce_fp32": True},
    ),
    "8B on 8 ranks, loss": (
        27.6,
        LLAMA_8B,
        {**CHECKPOINTED, **SHARDED, "seq_len": 8192, "reduce_fp32": True},
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_formula_agrees_with_the_traced_model_code(name: str) -> None:
    traced, model, changes = TRACES[name]
    found = predict(model, **{"seq_len": 4096, **changes})
    assert found.allocated_bytes / GIB == pytest.approx(traced, rel=0.04)
    assert found.low_bytes <= traced * GIB <= found.high_bytes


SMALL = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
}
FAMILIES = {
    # pure bf16, two rows of 4,096 tokens: traced GiB without and with checkpointing
    "qwen3": ({"head_dim": 128}, 6.628, 3.350),
    "gemma": ({"head_dim": 128}, 6.345, 3.203),
    "gemma3_text": ({"head_dim": 128}, 7.969, 3.581),
    "phi3": ({}, 6.283, 3.263),
    "phi": ({}, 5.592, 2.704),
    "gpt_neox": ({}, 4.608, 2.466),
    "olmo2": ({}, 7.067, 3.394),
    "starcoder2": ({}, 4.125, 2.143),
    "qwen2_moe": (
        {
            "num_experts": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 4096,
            "num_experts_per_tok": 4,
        },
        10.2,
        6.9,
    ),
    "mixtral": ({"num_local_experts": 8, "intermediate_size": 4096}, 10.044, 7.671),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_formula_agrees_with_the_traced_code_of_other_families(family: str) -> None:
    changes, whole, checkpointed = FAMILIES[family]
    model = from_config({"model_type": family, **SMALL, **changes})
    for traced, checkpointing in ((whole, False), (checkpointed, True)):
        found = predict(
            model,
            seq_len=4096,
            per_device_train_batch_size=2,
            master_weights=False,
            gradient_checkpointing=checkpointing,
        )
        assert found.allocated_bytes / GIB == pytest.approx(traced, rel=0.05)
