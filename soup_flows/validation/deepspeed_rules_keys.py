"""Rules about the keys of a DeepSpeed JSON: unknown, removed, deprecated, of the wrong kind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from soup_flows.errors import nearest
from soup_flows.validation.deepspeed_config import DeepSpeedJson, at
from soup_flows.validation.deepspeed_keys import (
    AUTO,
    DEPRECATED,
    LEFTOVERS,
    REMOVED,
    STRICT,
    blocks_of,
    home_of,
    table_of,
)
from soup_flows.validation.table import ACCELERATE, DEEPSPEED, TRANSFORMERS, Found, rule, rules_in

SHOWN_KEYS = 20
"""Unknown keys that are named one by one."""

_KINDS = {
    "b": "true or false",
    "i": "a whole number",
    "n": "a number",
    "s": "text",
    "d": "a block {...}",
    "l": "a list",
}


def _unknown(config: DeepSpeedJson, strict: bool | None) -> Iterator[Found]:
    """Yield the keys without a place in the top level (None), the strict or the lenient blocks."""
    lost = [
        (block, key)
        for block, values in blocks_of(config.values)
        if (block in STRICT if block else None) is strict
        for key in values
        if not _has_place(block, key)
    ]
    for block, key in lost[:SHOWN_KEYS]:
        homes = [home for home in home_of(key) if home != block]
        if homes and len(homes) <= 2:
            where = " or ".join(f"the block {home}" if home else "the top level" for home in homes)
            hint = f"move it to {where}"
        else:
            hint = nearest(key, table_of(block)) or "remove it"
        path = f"{block}.{key}".lstrip(".")
        yield at(path, f"{shown(path)} is not a key that DeepSpeed reads", hint)
    if len(lost) > SHOWN_KEYS:
        yield at("", f"{len(lost) - SHOWN_KEYS} more keys are none that DeepSpeed reads")


def _has_place(block: str, key: str) -> bool:
    """Whether DeepSpeed reads the key there, or another rule speaks of it."""
    path = f"{block}.{key}".lstrip(".")
    return key in table_of(block) or path in REMOVED or path in DEPRECATED or _is_leftover(path)


def _is_leftover(path: str) -> bool:
    """Whether a top-level key is a remark, or a known leftover of other projects' files."""
    return path in LEFTOVERS or ("." not in path and (path.startswith("_") or "comment" in path.lower()))


@rule(
    "DS019",
    "warning",
    "deepspeed_config",
    "DeepSpeed never reads it",
    fix="remove it",
    source="deepspeed/runtime/config.py: top-level keys are looked up one by one",
    versions=DEEPSPEED,
)
def leftovers(config: DeepSpeedJson) -> Iterator[Found]:
    """A remark (`_note`, `comment`), or a key that only other projects' files carry."""
    for key in config.values:
        if _is_leftover(key):
            yield at(key, f"{key!r} is there", f"use {LEFTOVERS[key]}" if key in LEFTOVERS else "")


@rule(
    "DS020",
    "error",
    "deepspeed_config",
    "it is ignored without a word, and the run trains without it",
    fix="use a key of the DeepSpeed configuration reference",
    source="deepspeed/runtime/config.py: top-level keys are looked up one by one",
    versions=DEEPSPEED,
)
def unknown_top(config: DeepSpeedJson) -> Iterator[Found]:
    """A top-level key that DeepSpeed does not know, such as `gradient_cliping`."""
    yield from _unknown(config, None)


@rule(
    "DS021",
    "error",
    "deepspeed_config",
    'every rank would stop with "extra inputs are not permitted"',
    fix="use a key of the DeepSpeed configuration reference",
    source="deepspeed/runtime/config_utils.py: DeepSpeedConfigModel forbids extra keys",
    versions=DEEPSPEED,
)
def unknown_strict(config: DeepSpeedJson) -> Iterator[Found]:
    """An unknown key in a block that DeepSpeed checks (ZeRO, off-load, bf16, fp16, monitors, ...)."""
    yield from _unknown(config, True)


@rule(
    "DS022",
    "error",
    "deepspeed_config",
    "it is ignored without a word, and the default is used",
    fix="use a key of the DeepSpeed configuration reference",
    source="deepspeed/runtime/swap_tensor/aio_config.py and alike: keys are looked up one by one",
    versions=DEEPSPEED,
)
def unknown_lenient(config: DeepSpeedJson) -> Iterator[Found]:
    """An unknown key in a block that DeepSpeed does not check (aio, optimizer, scheduler, data_types, ...)."""
    yield from _unknown(config, False)


@rule(
    "DS023",
    "error",
    "deepspeed_config",
    "DeepSpeed has removed it and refuses a config that still names it, even switched off",
    fix="delete it",
    source="deepspeed/runtime/config.py, _REMOVED_TOP_LEVEL_CONFIG_KEYS; deepspeedai/DeepSpeed#8489",
    versions=DEEPSPEED,
)
def removed(config: DeepSpeedJson) -> Iterator[Found]:
    """A block that DeepSpeed has removed."""
    for path, fix in REMOVED.items():
        if config.has(path):
            yield at(path, f"{path} is there", fix)


@rule(
    "DS024",
    "warning",
    "deepspeed_config",
    "it is an old name that goes away",
    fix="use the new name",
    source="deepspeed/runtime/zero/config.py, fields marked deprecated",
    versions=DEEPSPEED,
)
def deprecated(config: DeepSpeedJson) -> Iterator[Found]:
    """A deprecated key."""
    for path, new in DEPRECATED.items():
        if config.has(path):
            yield at(path, f"{path} is there", f"write {new} instead")


@rule(
    "DS025",
    "error",
    "deepspeed_config",
    "DeepSpeed refuses two values for one setting",
    fix="keep the new name",
    source="deepspeed/runtime/config_utils.py, _process_deprecated_field",
    versions=DEEPSPEED,
)
def twice(config: DeepSpeedJson) -> Iterator[Found]:
    """A deprecated key, or one with `stage3_`, together with its other name."""
    pairs = [("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")]
    gather = [
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ]
    pairs += [(gather[2], name) for name in gather[:2]]
    for old, new in pairs:
        if config.get(f"zero_optimization.{old}") and config.has(f"zero_optimization.{new}"):
            yield at(f"zero_optimization.{old}", f"{old} and {new} are both there")


@rule(
    "DS026",
    "error",
    "deepspeed_config",
    "DeepSpeed stops at it, or compares and counts with the wrong value",
    fix="write a value of that kind, without quotes around numbers",
    source="pydantic models of deepspeed/runtime; transformers/integrations/deepspeed.py, fill_match",
    versions=f"{DEEPSPEED}, {TRANSFORMERS}",
)
def wrong_kind(config: DeepSpeedJson) -> Iterator[Found]:
    """A value of the wrong kind, such as `"2e8"` for a whole number or `true` for a block."""
    for block, values in blocks_of(config.values):
        table = table_of(block)
        for key, value in values.items():
            path = f"{block}.{key}".lstrip(".")
            if (
                key not in table
                or value == "auto"
                or path in ("zero_optimization", "zero_optimization.stage")
            ):
                continue  # "auto" and the stage have rules of their own
            if not _fits(value, table[key], block in STRICT):
                yield at(path, f"{path} is {shown(value)}, and {_KINDS[table[key][0]]} is needed")
    for name in ("optimizer.params", "scheduler.params"):
        for key, value in (config.get(name) or {}).items() if isinstance(config.get(name), Mapping) else ():
            if isinstance(value, str) and value != "auto" and re.fullmatch(r"[-+0-9.eE]+", value):
                yield at(f"{name}.{key}", f"{name}.{key} is {shown(value)}, and a number is needed")


def shown(value: object) -> str:
    """Return a value as a message quotes it, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _fits(value: Any, kind: str, parsed: bool) -> bool:
    """Say whether a value is of a kind; `parsed` blocks take what pydantic converts, such as "8" for 8."""
    if kind == "*" or (value is None and kind.endswith("?")):
        return True
    if parsed and isinstance(value, str):
        words = {"b": r"(?i)true|false|yes|no|on|off|0|1", "i": r"[-+]?\d+", "n": r"[-+0-9.eE]+"}
        if kind[0] in words:
            return re.fullmatch(words[kind[0]], value) is not None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "b": isinstance(value, bool) or (parsed and value in (0, 1)),
        "i": number and (isinstance(value, int) or (parsed and value.is_integer())),
        "n": number,
        "s": isinstance(value, str),
        "d": isinstance(value, Mapping),
        "l": isinstance(value, list),
    }[kind[0]]


@rule(
    "DS027",
    "error",
    "deepspeed_config",
    "nobody resolves it there: DeepSpeed's default is taken without a word, or the text is used as it is",
    fix="write the value",
    source="transformers/integrations/deepspeed.py, HfTrainerDeepSpeedConfig",
    versions=f"{TRANSFORMERS}, {ACCELERATE}",
)
def auto_elsewhere(config: DeepSpeedJson) -> Iterator[Found]:
    """`"auto"` in a place where neither transformers nor DeepSpeed resolves it."""
    for path, value in config.walk():
        if value == "auto" and path not in AUTO and not path.startswith("autotuning."):
            yield at(path, f'{path} is "auto"')


_CHOICES: dict[str, tuple[str, ...]] = {
    "zero_optimization.offload_optimizer.device": ("none", "cpu", "nvme"),
    "zero_optimization.offload_param.device": ("none", "cpu", "nvme"),
    "communication_data_type": ("fp16", "bf16", "fp32"),
    "seq_parallel_communication_data_type": ("fp16", "bf16", "fp32"),
    "data_types.grad_accum_dtype": ("fp16", "bf16", "fp32"),
    "gradient_allreduce_op": ("mean", "sum"),
    "checkpoint.tag_validation": ("ignore", "warn", "fail"),
    "scheduler.type": ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
}


@rule(
    "DS028",
    "error",
    "deepspeed_config",
    "DeepSpeed refuses it",
    fix="use one of the values it takes",
    source="deepspeed/runtime/config.py, zero/offload_config.py, lr_schedules.py",
    versions=DEEPSPEED,
)
def wrong_choice(config: DeepSpeedJson) -> Iterator[Found]:
    """A word that is not among those a setting takes."""
    for path, choices in _CHOICES.items():
        value = config.get(path)
        if not isinstance(value, str) or value == "auto":
            continue
        exact = path.startswith(("scheduler", "zero_optimization", "data_types"))
        if value not in choices if exact else value.lower() not in choices:
            hint = nearest(value, choices)
            yield at(path, f"{path} is {value!r}", f"use {', '.join(choices)}; {hint}".rstrip("; "))


RULES = rules_in(globals())
