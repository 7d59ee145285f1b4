"""The files of an attempt: what the ranks are told, and what the run directory keeps."""

from __future__ import annotations

from pathlib import Path

from soup_flows.attempt import lease_settings
from soup_flows.block_use import bring_back, credentials
from soup_flows.data.prepare import PreparedData
from soup_flows.deepspeed import write_deepspeed_config
from soup_flows.hardware import Hardware
from soup_flows.launch.plan import LaunchPlan, StallSettings, build_launch_plan
from soup_flows.ledger import Change
from soup_flows.paths import RunPaths, write_atomic, write_json
from soup_flows.resume import Orders, find_start
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec


def write_run(
    spec: TrainingSpec,
    hardware: Hardware,
    plan: ShardingPlan,
    paths: RunPaths,
    change: Change | None,
    data: PreparedData | None,
) -> tuple[LaunchPlan, Orders]:
    """Choose where the next attempt starts, and write its files.

    Raises:
        Refused: if it cannot start where it should, or its files cannot be written.
    """
    attempt = 1
    while paths.attempt(attempt).root.exists():
        attempt += 1
    bring_back(spec, paths)
    orders = find_start(spec, plan, paths, change)
    paths.report.unlink(missing_ok=True)  # the run goes on
    paths.temp.mkdir(mode=0o700, exist_ok=True)
    config_path = _write_config(spec, plan, paths, orders.universal)
    write_atomic(paths.spec, spec.model_dump_json(indent=2))
    write_atomic(paths.hardware, hardware.model_dump_json(indent=2))
    write_atomic(paths.plan, plan.model_dump_json(indent=2))
    if data is not None:
        write_atomic(paths.data, data.model_dump_json(indent=2))
    write_atomic(paths.orders, orders.model_dump_json(indent=2))
    threads = spec.launcher.omp_num_threads or max(1, hardware.cpu_cores // plan.ranks_per_node)
    with credentials(spec):
        launch = build_launch_plan(
            paths=paths,
            run_id=paths.root.name,
            attempt=attempt,
            nproc_per_node=plan.ranks_per_node,
            device=plan.device,
            config_path=config_path,
            omp_num_threads=threads,
            stop_budget_s=spec.launcher.stop_budget_s,
            timeout_s=spec.launcher.timeout_min * 60 if spec.launcher.timeout_min else None,
            cuda_visible_devices=_devices(hardware, plan),
            stall=StallSettings(floor_s=spec.launcher.stall_floor_s),
            lease=lease_settings(spec, plan),
        )
    write_atomic(paths.launch, launch.model_dump_json(indent=2))
    return launch, orders


def _write_config(spec: TrainingSpec, plan: ShardingPlan, paths: RunPaths, universal: bool) -> str | None:
    """Write the temporary config and its kept copy; a user's own JSON is copied byte for byte.

    With `universal` the ranks are told to read DeepSpeed's universal form of the checkpoint.
    """
    if not plan.config:
        return None
    if spec.deepspeed_config:
        content = Path(spec.deepspeed_config).expanduser().read_bytes()
        write_atomic(paths.config(plan.engine), content)
        return str(write_atomic(paths.temp / "deepspeed_config.json", content))
    config = plan.config | ({"checkpoint": {"load_universal": True}} if universal else {})
    write_json(paths.config(plan.engine), config)
    return write_deepspeed_config(config, paths.temp)


def _devices(hardware: Hardware, plan: ShardingPlan) -> str | None:
    """Name the GPUs of the run by UUID, so that `gpus=1` on a box with eight sees one; a lease replaces them."""
    if plan.device == "cpu":
        return None
    return ",".join(gpu.uuid for gpu in hardware.gpus[: plan.ranks_per_node])
