"""DeepSpeed and FSDP as Axolotl and LLaMA-Factory write them: a JSON file, or a list and a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from soup_flows.accelerate_config import fsdp_settings
from soup_flows.accelerate_keys import FSDP_KEYS
from soup_flows.errors import nearest
from soup_flows.migrate.reading import Reading
from soup_flows.migrate.values import NotTaken, Part
from soup_flows.user_file import expanded

DEEPSPEED, FSDP = "deepspeed", "fsdp"
BLOCK, VERSION = "fsdp_config", "fsdp_version"
WRAP = Part(
    ("deepspeed", "deepspeed_config", "strategy"), "a JSON that is here, else the preset for its name"
)
SHARD = Part(
    ("fsdp", "strategy", "training.gradient_checkpointing"), "the preset for its sharding and off-load"
)
WORDS = {"full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "no_shard": "NO_SHARD"}
WORDS |= {"hybrid_shard": "HYBRID_SHARD"}
IGNORED = ("auto_wrap", "")
"""Words of the list that change nothing: the model is wrapped layer by layer."""
MORE_KEYS = {
    "final_state_dict_type": "the final model is always one that from_pretrained opens",
    "cpu_offload_pin_memory": "off-loaded memory is pinned",
    "mixed_precision_policy": "training.dtype says it",
    "limit_all_gathers": "FSDP2 has no such setting",
    "min_num_params": "the model is wrapped layer by layer",
    "transformer_layer_cls_to_wrap": "the model names its layers itself",
    "xla": "TPUs are not supported",
}
"""Keys of the block that accelerate's YAML has not, or that change nothing here."""


def engine(shipped: Mapping[str, tuple[str, str]]) -> Callable[[Reading], None]:
    """Return a part for what wraps the model.

    Args:
        shipped: stem of a DeepSpeed JSON that the tool ships -> the preset here (or `ddp`) and what differs.
    """

    def read(reading: Reading) -> None:
        files, blocks = reading.asked(DEEPSPEED), reading.asked(FSDP) or reading.asked(BLOCK)
        if files and blocks:
            message = "deepspeed and fsdp exclude each other"
            reading.say(DEEPSPEED, "MIG007", "error", message, "keep one of them")
            for key in (FSDP, BLOCK, VERSION):
                if key in reading.values:
                    reading.say(key, "MIG007", "error", message, "keep one of them")
        elif files:
            _deepspeed(reading, shipped)
        elif blocks:
            _fsdp(reading)

    return read


def _deepspeed(reading: Reading, shipped: Mapping[str, tuple[str, str]]) -> None:
    value = reading.values[DEEPSPEED]
    if not isinstance(value, str):
        fix = "write it to a JSON file, and give that with --deepspeed-config"
        reading.wrong(DEEPSPEED, NotTaken("a config within the file is not read", fix), "deepspeed_config")
        return
    path = expanded(value)
    if path.is_file():
        reading.put("deepspeed_config", str(path), DEEPSPEED, note="the file is used byte for byte")
    elif path.stem in shipped:
        preset, note = shipped[path.stem]
        if preset:
            field = "strategy" if preset == "ddp" else "deepspeed"
            beside = f"the file is not here; the preset for what {reading.tool.name} ships under this name"
            reading.put(field, preset, DEEPSPEED, note="; ".join(part for part in (beside, note) if part))
        else:
            reading.wrong(DEEPSPEED, NotTaken(f"{path.name}: {note}", "use a preset"), "deepspeed")
    else:
        fix = nearest(path.stem, shipped) or "give the file with --deepspeed-config, or a preset"
        reading.wrong(DEEPSPEED, NotTaken(f"there is no file {value!r}", fix), "deepspeed_config")


def _fsdp(reading: Reading) -> None:
    given = reading.values.get(BLOCK)
    if given not in (None, "") and not isinstance(given, Mapping):
        reading.wrong(BLOCK, NotTaken(f"{given!r} is no group of settings", "write it in place"), "fsdp")
        return
    block = {str(key): value for key, value in (given or {}).items()}
    for key in [*block]:
        _known(reading, key)
    words = reading.values.get(FSDP)
    if isinstance(words, str):
        words = words.replace(",", " ").split()
    if reading.asked(FSDP) and not isinstance(words, list):
        block = {"fsdp_sharding_strategy": "FULL_SHARD"} | block  # `fsdp: true`
    for word in words if isinstance(words, list) else []:
        _word(reading, str(word).lower(), block)
    version = reading.values.get(VERSION)
    block.setdefault("fsdp_version", block.get("version", version if version is not None else 1))
    spec, problems = fsdp_settings(block)
    keys = [key for key in (FSDP, BLOCK, VERSION) if key in reading.values]
    for field, value in spec.items():
        if field == "training":
            for name, inner in value.items():
                # Turned on here, recomputation is turned off beside it, so that it is not done twice.
                reading.put(f"training.{name}", inner, BLOCK, over=True)
        else:
            reading.put(field, value, *keys)
    for problem in problems:
        rule = {"AC005": "MIG005"}.get(problem.id, "MIG006")
        key = f"{BLOCK}.{problem.field.rsplit('.', 1)[-1].removeprefix('fsdp_')}"
        reading.say(key, rule, problem.severity, problem.message, problem.fix)


def _known(reading: Reading, key: str) -> None:
    """Name a key of the block that is not known, or changes nothing here."""
    name = key.removeprefix("fsdp_")
    if name in MORE_KEYS:
        reading.say(f"{BLOCK}.{key}", "MIG003", "note", f"{key}: {MORE_KEYS[name]}")
    elif f"fsdp_{name}" not in FSDP_KEYS:
        known = [*FSDP_KEYS, *(k.removeprefix("fsdp_") for k in FSDP_KEYS), *MORE_KEYS]
        message = f"{key} is not a key that this reader knows from {BLOCK}"
        reading.say(f"{BLOCK}.{key}", "MIG002", "error", message, nearest(key, known) or "remove it")


def _word(reading: Reading, word: str, block: dict[str, Any]) -> None:
    """Read one word of the list; what the block says wins."""
    if word in WORDS:
        if not any(
            key.removeprefix("fsdp_") in ("sharding_strategy", "reshard_after_forward") for key in block
        ):
            block["fsdp_sharding_strategy"] = WORDS[word]
    elif word == "offload":
        block.setdefault("fsdp_offload_params", True)
    elif word not in IGNORED:
        fix = nearest(word, [*WORDS, "offload", "auto_wrap"]) or f"use {', '.join(WORDS)}"
        reading.wrong(FSDP, NotTaken(f"{word!r} is not supported", fix), "fsdp")
