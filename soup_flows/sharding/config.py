"""The engine's config of a strategy, fitted to the run."""

from __future__ import annotations

from typing import Any

from soup_flows.batch import Batch
from soup_flows.deepspeed import get_deepspeed_config, resolve_deepspeed_config
from soup_flows.fsdp import get_fsdp_config, resolve_fsdp_config
from soup_flows.hardware import Hardware
from soup_flows.sharding.asked import World
from soup_flows.sharding.values import Dtype, engine_of
from soup_flows.spec import TrainingSpec


def engine_config(
    spec: TrainingSpec, hardware: Hardware, world: World, strategy: str, dtype: Dtype, batch: Batch
) -> tuple[dict[str, Any], dict[str, int] | None, list[str]]:
    """Return the config of a preset, accelerate's `ParallelismConfig` sizes, and one note per adapted value.

    Raises:
        Refused: for a preset that cannot be fitted to the ranks or the machine.
    """
    engine = engine_of(strategy)
    local = batch.world_size // world.nodes
    if engine == "fsdp":
        config, notes = resolve_fsdp_config(get_fsdp_config(strategy), batch.world_size, local)
        return config["fsdp_config"], config.get("parallelism"), notes
    if engine != "deepspeed":
        return {}, None, []
    config, notes = resolve_deepspeed_config(
        get_deepspeed_config(strategy),
        batch.world_size,
        ranks_per_node=local,
        per_device_train_batch_size=batch.per_device_train_batch_size,
        train_batch_size=batch.global_batch_size,
        dtype=dtype,
        gradient_clipping=spec.training.max_grad_norm,
        nvme_path=spec.nvme_path,
        has_compiler=bool(hardware.cxx and hardware.ninja),
        pin_memory=None if world.device == "cuda" else False,
    )
    return config, None, notes
