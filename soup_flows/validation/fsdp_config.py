"""The check of an `fsdp_config` dict: transformers has no schema for it and drops what it does not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from soup_flows.errors import Problem, nearest
from soup_flows.validation.table import (
    ACCELERATE,
    PEFT,
    TRANSFORMERS,
    Found,
    Rule,
    by_severity,
    rule,
    rules_in,
)

FIELD = "fsdp_config"
KEYS = (
    *("version", "reshard_after_forward", "cpu_offload", "auto_wrap_policy", "min_num_params"),
    *("transformer_layer_cls_to_wrap", "cpu_ram_efficient_loading", "state_dict_type"),
    *("activation_checkpointing", "xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt"),
)
"""What `TrainingArguments._process_fsdp_args` of transformers 5.24 reads for FSDP2."""
V1_KEYS = (
    *("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states"),
    "limit_all_gathers",
)
"""What it reads for `version: 1` only."""
RENAMED = {
    "offload_params": "cpu_offload",
    "sharding_strategy": "reshard_after_forward (true for FULL_SHARD, false for SHARD_GRAD_OP)",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "mixed_precision_policy": "training.dtype",
    "mixed_precision": "training.dtype",
}
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATE_DICTS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")

_SOURCE = "transformers/training_args.py, _process_fsdp_args"


def _bare(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the prefix `fsdp_`, as transformers does."""
    return {str(key).removeprefix("fsdp_"): value for key, value in config.items()}


def _at(key: str, what: str, fix: str = "") -> Found:
    return Found(what, f"{FIELD}.{key}", fix)


@rule(
    "FS001",
    "error",
    FIELD,
    "it is dropped without a word",
    fix="remove it",
    source=_SOURCE,
    versions=TRANSFORMERS,
)
def unknown(config: Mapping[str, Any]) -> Iterator[Found]:
    """A key that transformers does not read."""
    for key in _bare(config):
        if key not in (*KEYS, *V1_KEYS):
            hint = f"use {RENAMED[key]}" if key in RENAMED else nearest(key, KEYS)
            yield _at(key, f"{key!r} is not a key of fsdp_config", hint)


@rule(
    "FS002",
    "error",
    FIELD,
    "it belongs to FSDP1 and is dropped without a word",
    fix="remove it",
    source=_SOURCE,
    versions=TRANSFORMERS,
)
def version_1_keys(config: Mapping[str, Any]) -> Iterator[Found]:
    """A key of FSDP1."""
    for key in _bare(config):
        if key in V1_KEYS:
            yield _at(key, f"{key} is there")


@rule(
    "FS003",
    "error",
    f"{FIELD}.version",
    "any number but 2 takes the FSDP1 path, which is deprecated and reads other keys",
    fix='write "version": 2',
    source=_SOURCE,
    versions=TRANSFORMERS,
)
def version(config: Mapping[str, Any]) -> Iterator[Found]:
    """A `version` other than 2."""
    value = _bare(config).get("version", 2)
    if value != 2 or isinstance(value, bool):
        yield _at("version", f"version is {value!r}")


@rule(
    "FS004",
    "error",
    FIELD,
    'text is refused, or counts as true: "false" switches it on',
    fix="write true or false, without quotes",
    source=_SOURCE,
    versions=f"{TRANSFORMERS}, {ACCELERATE}",
)
def not_boolean(config: Mapping[str, Any]) -> Iterator[Found]:
    """Text or a number where FSDP2 takes true or false, such as `reshard_after_forward: "FULL_SHARD"`."""
    for key in (
        "reshard_after_forward",
        "cpu_offload",
        "cpu_ram_efficient_loading",
        "activation_checkpointing",
    ):
        value = _bare(config).get(key, True)
        if not isinstance(value, bool):
            yield _at(key, f"{key} is {value!r}")


@rule(
    "FS005",
    "error",
    f"{FIELD}.auto_wrap_policy",
    "transformers refuses it",
    fix="use TRANSFORMER_BASED_WRAP",
    source=_SOURCE,
    versions=TRANSFORMERS,
)
def policy(config: Mapping[str, Any]) -> Iterator[Found]:
    """An unknown `auto_wrap_policy`, or a known one in lower case."""
    value = _bare(config).get("auto_wrap_policy", POLICIES[0])
    if value not in POLICIES:
        yield _at("auto_wrap_policy", f"auto_wrap_policy is {value!r}", nearest(str(value).upper(), POLICIES))


@rule(
    "FS006",
    "error",
    f"{FIELD}.auto_wrap_policy",
    "nothing is wrapped layer by layer: the whole model is gathered at once, or wrapping stops at a ModuleList",
    fix="use TRANSFORMER_BASED_WRAP",
    source="accelerate/utils/fsdp_utils.py, fsdp2_prepare_auto_wrap_policy",
    versions=ACCELERATE,
)
def no_layers(config: Mapping[str, Any]) -> Iterator[Found]:
    """`SIZE_BASED_WRAP` or `NO_WRAP`."""
    if _bare(config).get("auto_wrap_policy") in POLICIES[1:]:
        yield _at("auto_wrap_policy", f"auto_wrap_policy is {_bare(config)['auto_wrap_policy']}")


@rule(
    "FS007",
    "error",
    f"{FIELD}.state_dict_type",
    "accelerate refuses it",
    fix="use FULL_STATE_DICT",
    source="accelerate/utils/constants.py, FSDP2_STATE_DICT_TYPE",
    versions=ACCELERATE,
)
def state_dict(config: Mapping[str, Any]) -> Iterator[Found]:
    """A `state_dict_type` that FSDP2 does not have."""
    value = _bare(config).get("state_dict_type", STATE_DICTS[0])
    if str(value).upper() not in STATE_DICTS:
        yield _at(
            "state_dict_type", f"state_dict_type is {value!r}", nearest(str(value).upper(), STATE_DICTS)
        )


@rule(
    "FS008",
    "error",
    f"{FIELD}.activation_checkpointing",
    "LoRA adapters are saved without a tensor and lost on resume, and dropout draws other masks in the recompute",
    fix="remove it and set training.gradient_checkpointing",
    source="accelerate/utils/fsdp_utils.py, preserve_rng_state=False; huggingface/peft#3490, OLMo-core#828",
    versions=f"{ACCELERATE}, {PEFT}",
)
def checkpointing(config: Mapping[str, Any]) -> Iterator[Found]:
    """`activation_checkpointing` in `fsdp_config`."""
    if str(_bare(config).get("activation_checkpointing", False)).lower() in ("true", "1", "yes"):
        yield _at("activation_checkpointing", "activation_checkpointing is on in fsdp_config")


@rule(
    "FS009",
    "warning",
    f"{FIELD}.min_num_params",
    "it is read for SIZE_BASED_WRAP only, and ignored",
    fix="remove it",
    source=_SOURCE,
    versions=TRANSFORMERS,
)
def min_params(config: Mapping[str, Any]) -> Iterator[Found]:
    """`min_num_params` with another policy."""
    bare = _bare(config)
    if bare.get("min_num_params") and bare.get("auto_wrap_policy", POLICIES[0]) != "SIZE_BASED_WRAP":
        yield _at("min_num_params", f"min_num_params is {bare['min_num_params']!r}")


@rule(
    "FS010",
    "error",
    f"{FIELD}.xla",
    "it leaves FSDP of PyTorch for that of TPUs: nothing is sharded on GPUs",
    fix="remove it",
    source=_SOURCE,
    versions=TRANSFORMERS,
)
def xla(config: Mapping[str, Any]) -> Iterator[Found]:
    """A TPU key that is switched on."""
    for key in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"):
        if _bare(config).get(key):
            yield _at(key, f"{key} is on")


@rule(
    "FS011",
    "warning",
    f"{FIELD}.state_dict_type",
    "the final save writes nothing, and checkpoints hold no config, tokenizer or adapter",
    fix="use FULL_STATE_DICT",
    source="huggingface/transformers#30491, #37025",
    versions=TRANSFORMERS,
)
def sharded(config: Mapping[str, Any]) -> Iterator[Found]:
    """`SHARDED_STATE_DICT`."""
    if str(_bare(config).get("state_dict_type", "")).upper() == "SHARDED_STATE_DICT":
        yield _at("state_dict_type", "state_dict_type is SHARDED_STATE_DICT")


RULES: tuple[Rule[Mapping[str, Any]], ...] = rules_in(globals())


def check_fsdp_config(config: Mapping[str, Any]) -> list[Problem]:
    """Return every problem of what is given as `TrainingArguments(fsdp_config=...)`, errors first.

    Args:
        config: the dict; keys may have the prefix `fsdp_`.
    """
    return by_severity(problem for rule in RULES for problem in rule.apply(config))
