"""Shapes of mixture-of-experts families, as their transformers 5.24 classes build them."""

from __future__ import annotations

from itertools import groupby

from soup_flows.architecture.dense import Config, Family, attention, build, mlp
from soup_flows.architecture.value import Architecture, Layer, Linear


def experts(hidden: int, width: int, count: int) -> list[Linear]:
    """Return the router and the fused expert parameters `gate_up_proj` and `down_proj`."""
    return [
        Linear(name="gate", d_in=hidden, d_out=count, kind="router"),
        Linear(name="gate_up_proj", d_in=hidden, d_out=2 * width, count=count, kind="expert"),
        Linear(name="down_proj", d_in=width, d_out=hidden, count=count, kind="expert"),
    ]


def assemble(
    config: Config, family: Family, sparse: list[bool], moe_mlp: list[Linear], active: int
) -> Architecture:
    """Return the architecture of alternating dense and sparse layers.

    Args:
        config: the config.
        family: attention traits.
        sparse: for each layer, whether it routes.
        moe_mlp: matrices of a sparse layer's MLP.
        active: intermediate width a token passes in a sparse layer.
    """
    if family.head_dim == -1:
        linears, widths, inner = latent_attention(config)
    else:
        linears, widths, inner = attention(config, family)
    hidden = int(config["hidden_size"])
    top_k = int(config.get("num_experts_per_tok") or 2)
    dense_width = int(config.get("intermediate_size") or 4 * hidden)
    layers = []
    for routed, run in groupby(sparse):
        layers.append(
            Layer(
                count=len(list(run)),
                linears=(*linears, *(moe_mlp if routed else mlp(config, family, dense_width))),
                other_parameters=2 * hidden + inner,
                mlp_width=active if routed else dense_width,
                routed=top_k if routed else 0,
                **widths,
            )
        )
    return build(config, family, tuple(layers))


def mixtral(config: Config) -> Architecture:
    """Return the architecture of a Mixtral: every layer routes."""
    hidden, width = int(config["hidden_size"]), int(config["intermediate_size"])
    count = int(config.get("num_local_experts") or config.get("num_experts") or 8)
    top_k = int(config.get("num_experts_per_tok") or 2)
    layers = [True] * int(config["num_hidden_layers"])
    return assemble(config, Family(kv_heads=8), layers, experts(hidden, width, count), top_k * width)


def qwen_moe(config: Config) -> Architecture:
    """Return the architecture of a Qwen2-MoE (shared expert) or Qwen3-MoE (none)."""
    second = config["model_type"] == "qwen2_moe"
    if second:
        family = Family(qkv_bias="qkv_bias", flag_default=True, kv_heads=16)
    else:
        family = Family(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head", kv_heads=4)
    hidden, width = int(config["hidden_size"]), int(config["moe_intermediate_size"])
    count = int(config.get("num_experts") or config.get("num_local_experts") or (60 if second else 128))
    top_k = int(config.get("num_experts_per_tok") or (4 if second else 8))
    step, dense_only = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or []
    sparse = [
        i not in dense_only and count > 0 and (i + 1) % step == 0
        for i in range(int(config["num_hidden_layers"]))
    ]
    parts, active = experts(hidden, width, count), top_k * width
    if second:
        shared = int(config.get("shared_expert_intermediate_size") or 5632)
        parts += [*mlp(config, family, shared), Linear(name="shared_expert_gate", d_in=hidden, d_out=1)]
        active += shared
    return assemble(config, family, sparse, parts, active)


def deepseek(config: Config) -> Architecture:
    """Return the architecture of a DeepSeek-V2 or V3: latent attention, shared and routed experts."""
    third = config["model_type"] == "deepseek_v3"
    hidden, width = int(config["hidden_size"]), int(config["moe_intermediate_size"])
    count = int(config.get("n_routed_experts") or 64)
    shared = int(config.get("n_shared_experts") or 0) * width
    top_k = int(config.get("num_experts_per_tok") or (8 if third else 6))
    first = int(config.get("first_k_dense_replace", 3 if third else 0) or 0)
    family = Family(qkv_bias="attention_bias", mlp_bias="" if third else "mlp_bias", head_dim=-1)
    parts = [*experts(hidden, width, count), *(mlp(config, family, shared) if shared else [])]
    sparse = [i >= first for i in range(int(config["num_hidden_layers"]))]
    return assemble(config, family, sparse, parts, top_k * width + shared)


def latent_attention(config: Config) -> tuple[list[Linear], dict[str, int], int]:
    """Return the matrices, widths and inner norms of multi-head latent attention."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    rope, nope, value = (int(config[k]) for k in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    latent, low = int(config["kv_lora_rank"]), config.get("q_lora_rank")
    bias = bool(config.get("attention_bias", False))
    q, inner = heads * (nope + rope), latent
    if low:
        inner += int(low)
        linears = [
            Linear(name="q_a_proj", d_in=hidden, d_out=int(low), bias=bias),
            Linear(name="q_b_proj", d_in=int(low), d_out=q),
        ]
    else:
        linears = [Linear(name="q_proj", d_in=hidden, d_out=q)]
    linears += [
        Linear(name="kv_a_proj_with_mqa", d_in=hidden, d_out=latent + rope, bias=bias),
        Linear(name="kv_b_proj", d_in=latent, d_out=heads * (nope + value)),
        Linear(name="o_proj", d_in=heads * value, d_out=hidden, bias=bias),
    ]
    # Keys and values are expanded to every head before the kernel, so both are as wide as the queries.
    widths = {
        "q_width": q,
        "k_width": q,
        "v_width": heads * value,
        "out_width": heads * value,
        "heads": heads,
        "qk_norm_width": latent + int(low or 0),
    }
    return linears, widths, inner
