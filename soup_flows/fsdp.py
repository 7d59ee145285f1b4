"""FSDP2 presets: what users know as the sharding strategy, and what transformers 5.24 takes for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from soup_flows.batch import count_nodes, positive
from soup_flows.config_edit import ConfigEdit
from soup_flows.errors import nearest, refuse

FSDP_PRESETS: Mapping[str, str] = MappingProxyType(
    {
        "full_shard": "Shards parameters, gradients and optimizer state; for models whose weights do not fit "
        "on one GPU (like zero3).",
        "shard_grad": "Shards gradients and optimizer state, and keeps the parameters gathered from forward "
        "to backward; faster than full_shard when the weights fit on one GPU (like zero2).",
        "full_offload": "full_shard with parameters, gradients and the optimizer update in CPU memory; for "
        "models too large for all GPUs together.",
        "hybrid_shard": "full_shard inside each node and copies between nodes; for several nodes on a slow "
        "network whose single node can hold the model.",
    }
)
"""Preset name -> what it shards and when to use it."""

_STRATEGIES: dict[str, tuple[str, bool]] = {
    "full_shard": ("FULL_SHARD", False),
    "shard_grad": ("SHARD_GRAD_OP", False),
    "full_offload": ("FULL_SHARD", True),
    "hybrid_shard": ("HYBRID_SHARD", False),
}

# FSDP2 has a boolean where FSDP1 had strategies: are the parameters freed after a layer's forward pass?
# Hybrid sharding is full sharding on a two-dimensional mesh (accelerate's ParallelismConfig).
_RESHARD_AFTER_FORWARD = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True}


def get_fsdp_config(preset: str) -> dict[str, Any]:
    """Return the config of an FSDP preset.

    Args:
        preset: a name of `FSDP_PRESETS`.

    Returns:
        A fresh dict that the caller may change. `fsdp` holds `sharding_strategy` (FULL_SHARD, SHARD_GRAD_OP
        or HYBRID_SHARD), `auto_wrap_policy` and `offload_params`; `fsdp_config` is what
        `TrainingArguments(fsdp=True, fsdp_config=...)` takes, derived from it.

    Raises:
        Refused: a ValueError; unknown name (lists all, and the nearest).
    """
    if not isinstance(preset, str) or preset not in _STRATEGIES:
        raise refuse(
            "FSP001",
            "fsdp",
            f"{preset!r} is not an FSDP preset",
            " ".join(
                filter(None, [nearest(str(preset), FSDP_PRESETS), "presets: " + ", ".join(FSDP_PRESETS)])
            ),
        )
    strategy, offload = _STRATEGIES[preset]
    fsdp = {
        "sharding_strategy": strategy,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "offload_params": offload,
    }
    return {"fsdp": fsdp, "fsdp_config": fsdp_config_of(fsdp)}


def fsdp_config_of(fsdp: Mapping[str, Any]) -> dict[str, Any]:
    """Derive what `TrainingArguments(fsdp_config=...)` of transformers 5.24 takes from the `fsdp` block.

    There is no schema on that side: a key it does not know is dropped without a word
    (`TrainingArguments._process_fsdp_args`), so only keys that FSDP2 uses are here. Activation checkpointing
    belongs in TrainingArguments: in `fsdp_config` it makes peft save adapters without a tensor, and draws new
    dropout masks in the recompute. The layers to wrap are the model's own `_no_split_modules`.

    Args:
        fsdp: `sharding_strategy`, `auto_wrap_policy` and `offload_params`.

    Raises:
        Refused: a ValueError naming the key that has another value than these.
    """
    strategy, policy, offload = (
        fsdp.get(key) for key in ("sharding_strategy", "auto_wrap_policy", "offload_params")
    )
    if strategy not in _RESHARD_AFTER_FORWARD:
        raise refuse(
            "FSP002",
            "fsdp.sharding_strategy",
            f"got {strategy!r}",
            f"use {', '.join(_RESHARD_AFTER_FORWARD)}",
        )
    if policy != "TRANSFORMER_BASED_WRAP":
        raise refuse(
            "FSP002",
            "fsdp.auto_wrap_policy",
            f"got {policy!r}: FSDP2 would gather the whole model at once, or fail on a ModuleList",
            "use TRANSFORMER_BASED_WRAP",
        )
    if not isinstance(offload, bool):  # transformers takes any text as true
        raise refuse("FSP002", "fsdp.offload_params", f"got {offload!r}", "use true or false")
    return {
        "version": 2,
        "reshard_after_forward": _RESHARD_AFTER_FORWARD[strategy],
        "auto_wrap_policy": policy,
        "cpu_offload": offload,
        # All ranks get rank 0's weights; training/hollow.py keeps the others from reading the file all the same.
        "cpu_ram_efficient_loading": True,
        # The only type with which the final save, the best model and adapters all work.
        "state_dict_type": "FULL_STATE_DICT",
    }


def resolve_fsdp_config(
    cfg: Mapping[str, Any], world_size: int, ranks_per_node: int | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Fit an FSDP config to the ranks.

    `hybrid_shard` gets a third key, `parallelism`, with the sizes for accelerate's `ParallelismConfig`:
    `dp_shard_size` (ranks per node) times `dp_replicate_size` (nodes). On one node hybrid sharding is full
    sharding, and the config becomes that, with a note.

    Args:
        cfg: what `get_fsdp_config` returns; it is not changed.
        world_size: ranks over all nodes.
        ranks_per_node: ranks on each node; all of them on one node when empty.

    Returns:
        The new dict, and one note per change: old -> new and why.

    Raises:
        Refused: a ValueError; ranks that do not fill the nodes, or hybrid sharding with one rank per node.
    """
    nodes, local = count_nodes(positive("gpus", world_size), ranks_per_node)
    edit = ConfigEdit(cfg)
    if edit.cfg["fsdp"]["sharding_strategy"] != "HYBRID_SHARD":
        return edit.cfg, edit.notes
    if nodes == 1:
        why = "on one node hybrid sharding is full sharding"
        edit.set("fsdp.sharding_strategy", "FULL_SHARD", why)
        edit.drop("parallelism", why)
    elif local == 1:
        raise refuse(
            "FSP004",
            "fsdp",
            f"hybrid_shard shards inside a node; each of the {nodes} nodes has one rank: nothing to shard",
            "use full_shard to shard between the nodes, or strategy=ddp",
            "accelerate 1.15 parallelism_config.py",
        )
    else:
        sizes = {"dp_replicate_size": nodes, "dp_shard_size": local}
        edit.set("parallelism", sizes, f"{nodes} nodes with {local} ranks each")
    edit.cfg["fsdp_config"] = fsdp_config_of(edit.cfg["fsdp"])
    return edit.cfg, edit.notes
