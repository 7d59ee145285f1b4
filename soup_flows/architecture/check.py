"""Whether the keys of a `config.json` that this package reads hold what they must; every wrong one at once."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeGuard

from soup_flows.errors import Refused, refuse

_WIDTH = 10**7
_LAYERS = 10**5
"""No published model has more than some hundred layers."""
_POSITIONS = 10**9
"""Llama 4 Scout states 10,485,760 positions."""
_VOCABULARY = 10**8

_AT_MOST: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "model_dim", "hidden_dim"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "word_embed_proj_dim", "head_dim"), _WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), _WIDTH),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), _WIDTH),
    **dict.fromkeys(("num_experts_per_tok", "moe_intermediate_size"), _WIDTH),
    **dict.fromkeys(("shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), _WIDTH),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), _WIDTH),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "decoder_sparse_step", "first_k_dense_replace"), _LAYERS
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), _POSITIONS),
    "vocab_size": _VOCABULARY,
}
"""Whole numbers from 1 on, and the largest that is plausible."""
_ZERO = {"n_shared_experts", "first_k_dense_replace"}
_ZERO_ELSEWHERE = {"num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"}
"""Zero in the dense members of families that have both kinds, such as granitemoehybrid."""
_NEVER_NULL = {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
_TEXTS = ("model_type", "torch_dtype", "dtype", "hidden_act", "activation_function")
_OBJECTS = ("text_config", "quantization_config", "rope_scaling", "rope_parameters", "auto_map")
_SWITCHES = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "use_bias",
    "enable_bias",
    "qk_layernorm",
    "do_layer_norm_before",
    "layer_norm_elementwise_affine",
    "_remove_final_layer_norm",
    "is_encoder_decoder",
)


def check_config(config: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a `config.json` whose known keys hold what no model has; keys that are absent are fine.

    Args:
        config: the content of `config.json`; a `text_config` in it is checked as well.
        known: the `model_type`s whose shapes are written down; the others may give one number per layer as a
            list, have no experts, and write null for a size.

    Raises:
        Refused: `PLAN011`, with every wrong key, what was found, and what is wanted.
    """
    wrong = list(_wrong(config, known, ""))
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        wrong += _wrong(inner, known, "text_config.")
    if wrong:
        raise _refusal(wrong)


def _refusal(wrong: list[str]) -> Refused:
    """Return the one problem that names everything in `wrong`."""
    fix = "correct these values in config.json, or save the model again with save_pretrained()"
    return refuse("PLAN011", "model", "config.json is wrong: " + "; ".join(wrong), fix)


def _wrong(config: Mapping[str, Any], known: Collection[str], prefix: str) -> Iterator[str]:
    """Yield a clause for each wrong key of one level."""
    kind = config.get("model_type")
    written = isinstance(kind, str) and kind in known
    for key, value in config.items():
        wanted = _wanted(key, value, written)
        if wanted:
            yield f"{prefix}{key} is {reprlib.repr(value)}, wanted is {wanted}"
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if _whole(heads) and _whole(hidden) and 0 < hidden < heads and not config.get("head_dim"):
        yield f"{prefix}num_attention_heads is {heads}, wanted is at most hidden_size, which is {hidden}"
    quantization = config.get("quantization_config")
    for key, value in quantization.items() if isinstance(quantization, Mapping) else ():
        if not key.isprintable() or (isinstance(value, str) and not value.isprintable()):
            found = f"{reprlib.repr(key)}: {reprlib.repr(value)}"
            yield f"{prefix}quantization_config has {found}, wanted is text without control characters"


def _wanted(key: str, value: object, written: bool) -> str:
    """Return what `key` should hold, or an empty string where `value` is good or the key is not known."""
    if key in _AT_MOST:
        return _wanted_number(key, value, written)
    if value is None:
        return ""
    if key in _TEXTS and not _plain(value):
        return "a name in plain text"
    if key in _OBJECTS and not isinstance(value, Mapping):
        return "an object or null"
    if key in _SWITCHES and not isinstance(value, bool):
        return "true or false"
    if key == "architectures" and not (isinstance(value, list) and all(_plain(name) for name in value)):
        return "a list of class names"
    if key == "mlp_only_layers" and not (isinstance(value, list) and all(_whole(n) for n in value)):
        return "a list of layer numbers"
    return ""


def _wanted_number(key: str, value: object, written: bool) -> str:
    """Return which number `key` should hold, or an empty string where `value` is good."""
    least = 0 if key in _ZERO or (key in _ZERO_ELSEWHERE and not written) else 1
    most = _AT_MOST[key]
    if value is None:
        return f"a whole number from {least} to {most:,}" if written and key in _NEVER_NULL else ""
    values = value if isinstance(value, list) and value and not written else [value]
    good = all(_whole(item) and least <= item <= most for item in values)
    return "" if good else f"a whole number from {least} to {most:,}"


def _whole(value: object) -> TypeGuard[int]:
    """Say whether `value` is a JSON whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _plain(value: object) -> bool:
    """Say whether `value` is text that a terminal can be given."""
    return isinstance(value, str) and value.isprintable()
