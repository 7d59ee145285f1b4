"""The flow process of a drill without a server: `python -m soup_flows.drill.flow_process REQUEST.json`.

It calls the tasks' functions without Prefect, or, for a rehearsal, only the launch itself. It may be killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from soup_flows.launch.elastic import elastic_argv
from soup_flows.launch.plan import LaunchPlan, LeaseSettings, StallSettings, build_launch_plan
from soup_flows.launch.run import run
from soup_flows.paths import RunPaths, write_atomic, write_json

SMALL_DISK_BYTES = 4 << 20

LAUNCHER = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
ranks = [
    subprocess.Popen([sys.executable, *sys.argv[2:]], env=os.environ | {"RANK": str(number)}, start_new_session=True)
    for number in range(int(sys.argv[1]))
]
sys.exit(any([rank.wait() for rank in ranks]))
"""
"""Starts ranks as torch elastic does, each in a session of its own, and passes SIGTERM on."""


def main() -> None:
    """Run what the request says: `{"run_id", "values", "quick", "small_disk"}`."""
    request = json.loads(Path(sys.argv[1]).read_text())
    values, run_id = request["values"], request["run_id"]
    if request["small_disk"]:
        _mount_small_disk(RunPaths.of(values["output_dir"], run_id).root / "drill-disk")
    (rehearse if request["quick"] else train)(values, run_id)


def train(values: dict[str, Any], run_id: str) -> None:
    """Plan, validate, write and launch, as the flow does."""
    from soup_flows import tasks
    from soup_flows.demo import resolve_demo
    from soup_flows.spec import parse_spec

    spec = resolve_demo(parse_spec(values))
    hardware = tasks.detect_hardware.fn(spec.device, [spec.output_dir])
    plan = tasks.resolve_sharding_config.fn(spec, hardware)
    problems = tasks.validate_strategy.fn(spec, hardware, plan)
    launch = tasks.write_temp_config.fn(spec, hardware, plan, run_id)
    tasks.launch_distributed_train.fn(launch, problems)


def rehearse(values: dict[str, Any], run_id: str) -> None:
    """Launch ranks that only pretend to train."""
    run(rehearsal_plan(values, run_id))


def rehearsal_plan(
    values: dict[str, Any], run_id: str, lease: LeaseSettings | None = None, elastic: bool = True
) -> LaunchPlan:
    """Write the files of a run whose ranks only pretend to train, and return how to launch it.

    Without `elastic` a launcher of ten lines takes the place of torch elastic, which needs seconds to import.
    """
    paths, launcher = RunPaths.of(values["output_dir"], run_id).create(), values["launcher"]
    paths.temp.mkdir(mode=0o700)
    write_json(paths.spec, {"launcher": {"drill": None, **launcher}})
    limit_min = launcher.get("timeout_min")
    plan = build_launch_plan(
        paths=paths,
        run_id=run_id,
        attempt=1,
        nproc_per_node=2,
        device="cpu",
        config_path=str(write_json(paths.temp / "config.json", {})),
        omp_num_threads=1,
        stop_budget_s=launcher["stop_budget_s"],
        timeout_s=limit_min * 60 if limit_min else None,
        stall=StallSettings(floor_s=launcher["stall_floor_s"]),
        lease=lease,
    )
    program = ("-m", "soup_flows.training.drills", str(paths.root))
    argv = elastic_argv(run_id, 2, plan.stop_budget_s, *program)
    if not elastic:
        argv = (sys.executable, "-c", LAUNCHER, str(plan.nproc_per_node), *program)
    plan = plan.model_copy(update={"argv": argv})
    write_atomic(paths.launch, plan.model_dump_json(indent=2))
    return plan


def _mount_small_disk(folder: Path) -> None:
    """Mount a small tmpfs in this process's own mount namespace; it goes away with the last process."""
    folder.mkdir(parents=True, mode=0o700)
    options = f"size={SMALL_DISK_BYTES},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


if __name__ == "__main__":
    main()
