"""The files of an attempt: what the ranks are told, and what the run directory keeps."""

from __future__ import annotations

from soup_flows.attempt import lease_settings
from soup_flows.block_use import bring_back, credentials
from soup_flows.data.prepare import PreparedData
from soup_flows.hardware import Hardware
from soup_flows.launch.plan import LaunchPlan, StallSettings, build_launch_plan
from soup_flows.ledger import Change
from soup_flows.paths import RunPaths, write_atomic
from soup_flows.resume import Orders, find_start
from soup_flows.run_config import write_config
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
    config_path = write_config(spec, plan, paths, orders.universal)
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
            cuda_visible_devices=_devices(spec, hardware, plan),
            stall=StallSettings(floor_s=spec.launcher.stall_floor_s),
            lease=lease_settings(spec, plan),
            nodes=plan.nodes,
            cluster=spec.launcher.cluster,
            silence_s=spec.launcher.silence_s,
        )
    write_atomic(paths.launch, launch.model_dump_json(indent=2))
    return launch, orders


def present_attempt(launch: LaunchPlan) -> int:
    """Return the number of the attempt that the run is in: an engine may have begun another by itself."""
    try:
        return LaunchPlan.model_validate_json(launch.paths.launch.read_bytes()).attempt
    except (OSError, ValueError):
        return launch.attempt


def _devices(spec: TrainingSpec, hardware: Hardware, plan: ShardingPlan) -> str | None:
    """Name the GPUs of the run by UUID, so that `gpus=1` on a box with eight sees one; a lease replaces them.

    A cluster hands out the GPUs of its machines itself.
    """
    if plan.device == "cpu" or spec.launcher.cluster is not None:
        return None
    return ",".join(gpu.uuid for gpu in hardware.gpus[: plan.ranks_per_node])
