"""The presets side by side: what each shards, and how two of them differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from soup_flows.deepspeed import DEEPSPEED_ALIASES, DEEPSPEED_PRESETS, get_deepspeed_config
from soup_flows.errors import nearest, refuse
from soup_flows.fsdp import FSDP_PRESETS, get_fsdp_config


class PresetRow(BaseModel):
    """One strategy, as README and `soup-flows presets` show it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    engine: Literal["none", "ddp", "deepspeed", "fsdp"]
    shards: str
    """Which of parameters, gradients and optimizer state are divided over the ranks."""
    offload: str
    """What leaves the GPU, and where to."""
    when: str
    """What it does and when to use it."""


_UNSHARDED = (
    PresetRow(
        name="single",
        engine="none",
        shards="nothing",
        offload="nothing",
        when="One process on one GPU; when everything fits there.",
    ),
    PresetRow(
        name="ddp",
        engine="ddp",
        shards="nothing",
        offload="nothing",
        when="A whole copy on every GPU; the fastest when weights, gradients and optimizer state fit.",
    ),
)

_STAGES = {1: "optimizer state", 2: "gradients, optimizer state", 3: "parameters, gradients, optimizer state"}

_WHY: dict[str, str] = {
    "train_batch_size": "rows per optimizer step over all GPUs",
    "train_micro_batch_size_per_gpu": "rows a GPU computes at once",
    "gradient_accumulation_steps": "passes per optimizer step",
    "gradient_clipping": "norm that gradients are scaled down to; auto follows max_grad_norm",
    "bf16.enabled": "compute in bf16; auto follows the run's dtype",
    "fp16.enabled": "compute in fp16; auto follows the run's dtype",
    "data_types.grad_accum_dtype": "micro batches are summed in this dtype",
    "steps_per_print": "how often DeepSpeed prints by itself",
    "wall_clock_breakdown": "DeepSpeed's own timers; they synchronise the GPU",
    "zero_optimization.stage": "1 shards the optimizer state, 2 also gradients, 3 also parameters",
    "zero_optimization.overlap_comm": "communicate during the backward pass; stage 3 needs it for speed, "
    "wrong gradients were reported at stages 1 and 2",
    "zero_optimization.contiguous_gradients": "gradients in one buffer: less fragmentation",
    "zero_optimization.reduce_scatter": "each rank gets only the gradients it keeps",
    "zero_optimization.reduce_bucket_size": "elements reduced at once: memory against speed; auto is the "
    "model's hidden size squared",
    "zero_optimization.allgather_partitions": "gather updated weights in one collective",
    "zero_optimization.allgather_bucket_size": "elements gathered at once: memory against speed",
    "zero_optimization.stage3_prefetch_bucket_size": "elements of the next layers fetched ahead",
    "zero_optimization.stage3_param_persistence_threshold": "smaller parameters stay whole on every GPU",
    "zero_optimization.sub_group_size": "elements per piece of the optimizer step; on NVMe the size of the "
    "swap buffers",
    "zero_optimization.stage3_max_live_parameters": "gathered elements a GPU may hold at once",
    "zero_optimization.stage3_max_reuse_distance": "keep a gathered layer if it is used again within this "
    "many elements",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "gather the shards on save; without it "
    "there is no model file",
    "zero_optimization.offload_optimizer.device": "where the optimizer state lives and is updated",
    "zero_optimization.offload_param.device": "where parameters wait while they are not in use",
    "zero_optimization.offload_optimizer.pin_memory": "page-locked memory: faster copies, cannot be swapped",
    "zero_optimization.offload_param.pin_memory": "page-locked memory: faster copies, cannot be swapped",
    "zero_optimization.offload_optimizer.nvme_path": "folder for the swap files, used with device nvme",
    "zero_optimization.offload_param.nvme_path": "folder for the swap files, used with device nvme",
    "zero_optimization.offload_optimizer.buffer_count": "swap buffers: parameter, gradient, two Adam states",
    "zero_optimization.offload_param.buffer_count": "swap buffers for parameters",
    "zero_optimization.offload_param.buffer_size": "elements per swap buffer; holds a rank's largest shard",
    "zero_optimization.offload_param.max_in_cpu": "parameter elements that stay in CPU memory beside NVMe",
    "zero_optimization.offload_optimizer.pipeline_read": "read ahead from NVMe; doubles the buffers",
    "zero_optimization.offload_optimizer.pipeline_write": "write behind to NVMe; doubles the buffers",
    "zero_optimization.offload_optimizer.fast_init": "faster start when off-loading to NVMe",
    "zero_optimization.zero_hpz_partition_size": "ranks that share a second copy of the weights: those of "
    "one node, so that the backward pass gathers inside it; 1 is off",
    "zero_optimization.zero_quantized_weights": "gather weights in 8 bits; lossy, needs fp16 and a CUDA op",
    "zero_optimization.zero_quantized_gradients": "reduce gradients in 4 bits between nodes; lossy, fp16",
    "aio.block_size": "bytes per NVMe request",
    "aio.queue_depth": "NVMe requests in flight",
    "aio.intra_op_parallelism": "threads per NVMe request",
    "aio.single_submit": "submit NVMe requests one by one",
    "aio.overlap_events": "wait for NVMe requests while submitting others",
    "fsdp.sharding_strategy": "what is sharded, in the words of FSDP1",
    "fsdp.auto_wrap_policy": "one unit of sharding per transformer layer",
    "fsdp.offload_params": "parameters, gradients and optimizer step in CPU memory",
    "fsdp_config.version": "FSDP2",
    "fsdp_config.reshard_after_forward": "free a layer's gathered parameters after its forward pass; false "
    "keeps them until backward: faster, and the whole model must fit in compute dtype",
    "fsdp_config.auto_wrap_policy": "one unit of sharding per transformer layer",
    "fsdp_config.cpu_offload": "parameters, gradients and optimizer step in CPU memory",
    "fsdp_config.cpu_ram_efficient_loading": "all ranks start from rank 0's weights",
    "fsdp_config.state_dict_type": "checkpoints hold whole tensors, which every kind of save can use",
}
"""Key of a preset -> what it does."""


def strategy_settings(preset: str, plain: Sequence[str] = ("ddp", "single")) -> dict[str, str]:
    """Return the one setting of a spec that asks for a preset, such as `{"fsdp": "full_shard"}`.

    Args:
        preset: a preset of DeepSpeed or FSDP, or one of `plain`.
        plain: strategies without a preset that are taken.

    Raises:
        Refused: for another name, with the nearest.
    """
    kinds = (
        ("deepspeed", (*DEEPSPEED_PRESETS, *DEEPSPEED_ALIASES)),
        ("fsdp", FSDP_PRESETS),
        ("strategy", tuple(plain)),
    )
    kind = next((kind for kind, names in kinds if preset in names), None)
    if kind is None:
        names = [name for _, group in kinds for name in group]
        fix = f"{nearest(preset, names)} Presets: {', '.join(names)}".strip()
        raise refuse("DEMO004", "preset", f"got {preset!r}", fix)
    return {kind: preset}


def presets_table() -> list[PresetRow]:
    """Return every strategy with what it shards and off-loads, read from the configs themselves."""
    return [
        *_UNSHARDED,
        *(_deepspeed_row(name) for name in DEEPSPEED_PRESETS),
        *(_fsdp_row(name) for name in FSDP_PRESETS),
    ]


def explain_difference(preset_a: str, preset_b: str) -> str:
    """Explain preset `preset_a` against `preset_b`, one line per key that differs.

    Args:
        preset_a: any name of `presets_table()`, or an alias; the new choice.
        preset_b: what it is compared with.

    Returns:
        Several lines: what each shards and off-loads, then `key: value of b -> value of a  (what the key
        does)`. Across engines only the first part, since no key means the same there.

    Raises:
        Refused: a ValueError; unknown name (lists all, and the nearest).
    """
    a, b = _row(preset_a), _row(preset_b)
    lines = [f"{a.name} against {b.name}"]
    for row in (a, b) if a != b else (a,):
        lines.append(f"  {row.name} ({row.engine}) shards {row.shards}; off-loads {row.offload}. {row.when}")
    if a.engine != b.engine:
        return "\n".join([*lines, f"  Their keys cannot be compared: {a.engine} and {b.engine} share none."])
    old, new = _flat(_config(b)), _flat(_config(a))
    changed = [key for key in {**old, **new} if old.get(key, _ABSENT) != new.get(key, _ABSENT)]
    lines += [
        f"  {key}: {_text(old, key)} -> {_text(new, key)}  ({_WHY.get(key, 'see the engine')})"
        for key in changed
    ]
    return "\n".join(lines if changed else [*lines, "  No key differs."])


_ABSENT = object()


def _text(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "not set"


def _flat(block: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a nested dict by dotted path."""
    leaves: dict[str, Any] = {}
    for key, value in block.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return leaves


def _row(name: str) -> PresetRow:
    rows = {row.name: row for row in presets_table()}
    found = rows.get(DEEPSPEED_ALIASES.get(name, name))
    if found is None:
        fix = " ".join(filter(None, [nearest(name, rows), "presets: " + ", ".join(rows)]))
        raise refuse("PRS001", "preset", f"{name!r} is not a preset", fix)
    return found


def _config(row: PresetRow) -> dict[str, Any]:
    if row.engine == "deepspeed":
        return get_deepspeed_config(row.name)
    return get_fsdp_config(row.name) if row.engine == "fsdp" else {}


def _deepspeed_row(name: str) -> PresetRow:
    zero = get_deepspeed_config(name)["zero_optimization"]
    shards = _STAGES[zero["stage"]]
    if "zero_hpz_partition_size" in zero:
        shards += "; a second copy of the parameters inside each node"
    places = {"offload_param": "parameters", "offload_optimizer": "optimizer state"}
    moved = [what for block, what in places.items() if zero.get(block)]
    device = {"cpu": "CPU", "nvme": "NVMe"}[zero["offload_optimizer"]["device"]] if moved else ""
    offload = f"{', '.join(moved)} to {device}" if moved else "nothing"
    return PresetRow(
        name=name, engine="deepspeed", shards=shards, offload=offload, when=DEEPSPEED_PRESETS[name]
    )


def _fsdp_row(name: str) -> PresetRow:
    fsdp = get_fsdp_config(name)["fsdp"]
    shards = {
        "FULL_SHARD": _STAGES[3],
        "SHARD_GRAD_OP": f"{_STAGES[2]}; parameters outside forward and backward only",
        "HYBRID_SHARD": f"{_STAGES[3]} inside each node",
    }[fsdp["sharding_strategy"]]
    offload = f"{_STAGES[3]} to CPU" if fsdp["offload_params"] else "nothing"
    return PresetRow(name=name, engine="fsdp", shards=shards, offload=offload, when=FSDP_PRESETS[name])
