"""The sharding config that the ranks read: temporary, with a copy that stays."""

from __future__ import annotations

from soup_flows.deepspeed import write_deepspeed_config
from soup_flows.paths import RunPaths, write_atomic, write_json
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.user_file import expanded


def write_config(spec: TrainingSpec, plan: ShardingPlan, paths: RunPaths, universal: bool) -> str | None:
    """Write the temporary config and its kept copy; a user's own JSON is copied byte for byte.

    With `universal` the ranks are told to read DeepSpeed's universal form of the checkpoint.
    """
    if not plan.config:
        return None
    if spec.deepspeed_config:
        content = expanded(spec.deepspeed_config).read_bytes()
        write_atomic(paths.config(plan.engine), content)
        return str(write_atomic(paths.temp / "deepspeed_config.json", content))
    config = plan.config | ({"checkpoint": {"load_universal": True}} if universal else {})
    write_json(paths.config(plan.engine), config)
    return write_deepspeed_config(config, paths.temp)
