"""Launches whose ranks only pretend to train, so that what is measured is the launch."""

from __future__ import annotations

import sys
from pathlib import Path

from prefect import flow, get_run_logger, runtime

from benchmarks.peers import PROGRAMS
from soup_flows.attempt import run_attempt
from soup_flows.drill.flow_process import LAUNCHER
from soup_flows.launch.plan import LaunchPlan, build_launch_plan
from soup_flows.own_run import own_run_watch
from soup_flows.paths import RunPaths


def light_plan(
    folder: Path, run_id: str, ranks: int, *, steps: int = 20, seconds: float = 0.05, lines: int = 0
) -> LaunchPlan:
    """Return a launch of light ranks.

    Args:
        folder: output folder.
        run_id: name of the run.
        ranks: how many.
        steps: that each rank makes.
        seconds: that a step takes.
        lines: that each rank prints, over all steps.
    """
    plan = build_launch_plan(
        paths=RunPaths.of(folder, run_id).create(),
        run_id=run_id,
        attempt=1,
        nproc_per_node=ranks,
        device="cpu",
        config_path=None,
        omp_num_threads=1,
        stop_budget_s=20.0,
        timeout_s=None,
    )
    program = (str(PROGRAMS / "light_rank.py"), str(steps), str(seconds), str(lines))
    return plan.model_copy(update={"argv": (sys.executable, "-c", LAUNCHER, str(ranks), *program)})


@flow(name="bench-light")
def light_flow(output_dir: str) -> None:
    """Launch two light ranks from a flow, as the task launches those that train."""
    plan = light_plan(Path(output_dir), str(runtime.flow_run.id), 2)
    with own_run_watch() as server_says:
        outcome = run_attempt(plan, get_run_logger(), server_says)
    assert outcome.exit_code == 0, outcome
