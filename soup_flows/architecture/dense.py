"""Shapes of dense decoder families, read from `config.json` as their transformers 5.24 classes read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from soup_flows.architecture.value import Architecture, Layer, Linear

Config = Mapping[str, Any]


class NotWritten(ValueError):
    """A variant of a family that is not written down here; it can be counted on the meta device."""


@dataclass(frozen=True)
class Family:
    """How one family differs from Llama. A `str` flag names the config key that switches it."""

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    gated: bool = True
    norms: int = 2
    norm: Literal["rms", "layer", "bare"] = "rms"
    wide_norm: bool = False
    sdpa: bool = True
    activation: str = "gelu"
    qk_norm: Literal["", "head", "width"] = ""
    fused_qkv: str = ""
    fused_gate_up: str = ""
    up: str = "up_proj"
    down: str = "down_proj"
    out: str = "o_proj"
    tied: bool = False
    head_bias: bool = False
    kv_heads: int | None = None
    multi_head: bool = False
    head_dim: int | None = None
    flag_default: bool = False


# Source: transformers 5.24, models/<family>/{configuration,modeling}_<family>.py.
FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(kv_heads=8),
    "ministral": Family(kv_heads=8),
    "qwen2": Family(qkv_bias=True, kv_heads=32),
    "qwen3": Family(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head", kv_heads=32, head_dim=128
    ),
    "gemma": Family(
        wide_norm=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        tied=True,
        kv_heads=16,
        head_dim=256,
    ),
    "gemma2": Family(
        wide_norm=True,
        sdpa=False,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=4,
        tied=True,
        kv_heads=4,
        head_dim=256,
    ),
    "gemma3_text": Family(
        wide_norm=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=4,
        qk_norm="head",
        tied=True,
        kv_heads=4,
        head_dim=256,
    ),
    "phi": Family(
        activation="gelu_new",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        norms=1,
        norm="layer",
        up="fc1",
        down="fc2",
        out="dense",
        head_bias=True,
    ),
    "phi3": Family(fused_qkv="qkv_proj", fused_gate_up="gate_up_proj"),
    "gpt_neox": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias=True,
        gated=False,
        norm="layer",
        fused_qkv="query_key_value",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
        out="dense",
        multi_head=True,
        flag_default=True,
    ),
    "olmo": Family(qkv_bias="attention_bias", o_bias="attention_bias", norm="bare"),
    "olmo2": Family(wide_norm=True, qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="width"),
    "olmo3": Family(wide_norm=True, qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="width"),
    "smollm3": Family(
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", tied=True, kv_heads=4
    ),
    "granite": Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "starcoder2": Family(
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        gated=False,
        norm="layer",
        up="c_fc",
        down="c_proj",
        tied=True,
        kv_heads=2,
        flag_default=True,
    ),
}


def kept_by_activation(name: str) -> int:
    """Return how many tensors an activation without gate keeps; see `Layer.inner_tensors`."""
    return 4 if name in ("gelu_new", "gelu_fast") else 1


def norm_parameters(family: Family, width: int) -> int:
    """Return the elements of one norm over `width` channels."""
    return {"rms": width, "layer": 2 * width, "bare": 0}[family.norm]


def attention(config: Config, family: Family) -> tuple[list[Linear], dict[str, int], int]:
    """Return the attention matrices, the widths a `Layer` states, and the elements of its inner norms."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv = heads if family.multi_head else int(config.get("num_key_value_heads") or family.kv_heads or heads)
    head_dim = int(config.get("head_dim") or family.head_dim or hidden // heads)
    q, k = heads * head_dim, kv * head_dim
    qkv_bias, o_bias = (_flag(config, flag, family) for flag in (family.qkv_bias, family.o_bias))
    if family.fused_qkv:
        linears = [Linear(name=family.fused_qkv, d_in=hidden, d_out=q + 2 * k, bias=qkv_bias)]
    else:
        linears = [
            Linear(name=name, d_in=hidden, d_out=width, bias=qkv_bias)
            for name, width in (("q_proj", q), ("k_proj", k), ("v_proj", k))
        ]
    linears.append(Linear(name=family.out, d_in=q, d_out=hidden, bias=o_bias))
    inner = {"": 0, "head": 2 * head_dim, "width": q + k}[family.qk_norm]
    widths = {
        "q_width": q,
        "k_width": k,
        "v_width": k,
        "out_width": q,
        "heads": heads,
        "qk_norm_width": q + k if family.qk_norm else 0,
    }
    return linears, widths, inner


def mlp(config: Config, family: Family, width: int) -> list[Linear]:
    """Return the matrices of a dense MLP with intermediate width `width`."""
    hidden, bias = int(config["hidden_size"]), _flag(config, family.mlp_bias, family)
    down = Linear(name=family.down, d_in=width, d_out=hidden, bias=bias)
    if family.fused_gate_up:
        return [Linear(name=family.fused_gate_up, d_in=hidden, d_out=2 * width, bias=bias), down]
    names = ["gate_proj", family.up] if family.gated else [family.up]
    return [*(Linear(name=name, d_in=hidden, d_out=width, bias=bias) for name in names), down]


def build(
    config: Config, family: Family, layers: tuple[Layer, ...], notes: tuple[str, ...] = ()
) -> Architecture:
    """Put layers together with the embedding, the head and the final norm that `config` describes."""
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    tied = bool(config.get("tie_word_embeddings", family.tied))
    return Architecture(
        model_type=str(config["model_type"]),
        hidden_size=hidden,
        vocab_size=vocab,
        tied=tied,
        embedding_parameters=vocab * hidden,
        head_parameters=0 if tied else vocab * hidden,
        root_parameters=norm_parameters(family, hidden) + (vocab if family.head_bias else 0),
        layers=layers,
        sdpa=family.sdpa,
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        notes=notes,
    )


def dense(config: Config, family: Family) -> Architecture:
    """Return the architecture of a model whose layers are all alike.

    Raises:
        KeyError: if the config lacks a size the family has no default for.
        NotWritten: if it uses a variant that is not written down here.
    """
    if config.get("qk_layernorm"):
        raise NotWritten("qk_layernorm is not written down for this family")
    hidden = int(config["hidden_size"])
    width = int(config.get("intermediate_size") or 4 * hidden)
    linears, widths, inner = attention(config, family)
    layer = Layer(
        count=int(config["num_hidden_layers"]),
        linears=(*linears, *mlp(config, family, width)),
        other_parameters=family.norms * norm_parameters(family, hidden) + inner,
        norms=family.norms,
        rms_norm=family.norm == "rms",
        wide_norm=family.wide_norm,
        fused_qkv=bool(family.fused_qkv),
        mlp_width=width,
        gated=family.gated,
        inner_tensors=3
        if family.gated
        else kept_by_activation(config.get("hidden_act") or family.activation),
        **widths,
    )
    return build(config, family, (layer,))


def gpt2(config: Config) -> Architecture:
    """Return the architecture of a GPT-2: learned positions, fused projections, LayerNorm, tied head."""
    hidden, heads = int(config["n_embd"]), int(config["n_head"])
    width = int(config.get("n_inner") or 4 * hidden)
    shapes = (
        ("c_attn", hidden, 3 * hidden),
        ("c_proj", hidden, hidden),
        ("c_fc", hidden, width),
        ("c_proj", width, hidden),
    )
    layer = Layer(
        count=int(config["n_layer"]),
        linears=tuple(Linear(name=n, d_in=a, d_out=b, bias=True) for n, a, b in shapes),
        other_parameters=4 * hidden,
        rms_norm=False,
        q_width=hidden,
        k_width=hidden,
        v_width=hidden,
        out_width=hidden,
        heads=heads,
        mlp_width=width,
        gated=False,
        inner_tensors=kept_by_activation(config.get("activation_function") or "gelu_new"),
    )
    family = Family(norm="layer", tied=True)
    whole = build({**config, "hidden_size": hidden}, family, (layer,))
    positions = int(config.get("n_positions") or 1024) * hidden
    return whole.model_copy(update={"embedding_parameters": whole.embedding_parameters + positions})


def opt(config: Config) -> Architecture:
    """Return the architecture of an OPT: learned positions and biases everywhere."""
    hidden, heads, width = (int(config[k]) for k in ("hidden_size", "num_attention_heads", "ffn_dim"))
    if int(config.get("word_embed_proj_dim") or hidden) != hidden:
        raise NotWritten("word_embed_proj_dim other than hidden_size is not written down for opt")
    bias = bool(config.get("enable_bias", True))
    affine = 2 * hidden if config.get("layer_norm_elementwise_affine", True) else 0
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    linears = [Linear(name=name, d_in=hidden, d_out=hidden, bias=bias) for name in names]
    linears += [
        Linear(name="fc1", d_in=hidden, d_out=width, bias=bias),
        Linear(name="fc2", d_in=width, d_out=hidden, bias=bias),
    ]
    layer = Layer(
        count=int(config["num_hidden_layers"]),
        linears=tuple(linears),
        other_parameters=2 * affine,
        rms_norm=False,
        q_width=hidden,
        k_width=hidden,
        v_width=hidden,
        out_width=hidden,
        heads=heads,
        mlp_width=width,
        gated=False,
        inner_tensors=1,
    )
    whole = build(config, Family(norm="bare", tied=True), (layer,))
    positions = (int(config.get("max_position_embeddings") or 2048) + 2) * hidden
    final = bool(config.get("do_layer_norm_before", True)) and not config.get("_remove_final_layer_norm")
    return whole.model_copy(
        update={
            "embedding_parameters": whole.embedding_parameters + positions,
            "root_parameters": affine if final else 0,
        }
    )


def _flag(config: Config, flag: bool | str, family: Family) -> bool:
    """Return a fixed flag, or the value of the config key it names."""
    return bool(config.get(flag, family.flag_default)) if isinstance(flag, str) else flag
