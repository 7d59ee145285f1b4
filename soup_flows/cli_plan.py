"""`soup-flows plan`: what would run, here or on machines that are not here; starts nothing but a rehearsal."""

# ruff: noqa: T201 (a command prints)

from __future__ import annotations

import argparse
import json
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soup_flows.cli_runs import GOOD, REFUSED, print_json, print_refused
from soup_flows.demo import resolve_demo
from soup_flows.errors import Problem, Refused
from soup_flows.hardware import Hardware, detect, imagined
from soup_flows.hardware.recorded import read_recorded
from soup_flows.launch.engines.ray import per_machine, submission
from soup_flows.launch.engines.slurm_text import batch_script
from soup_flows.launch.plan import LaunchPlan, build_launch_plan
from soup_flows.lent import run_environment
from soup_flows.measured import recall
from soup_flows.migrate import command as migrate
from soup_flows.migrate.read import save_spec
from soup_flows.paths import RunPaths
from soup_flows.plan_page import fit_text, plan_terminal
from soup_flows.sharding import ShardingPlan, make_plan
from soup_flows.sharding.fit import fit
from soup_flows.sharding.trace import trace_plan
from soup_flows.spec import TrainingSpec, parse_spec
from soup_flows.terminal import problems_text
from soup_flows.validation import apply_fixes, count_rows, validate, with_others

PREVIEW = "RUN-ID"
"""Stands for the run's name in a launch that is only shown."""
MOST_NODES = 1024
GPUS_PER_MACHINE = 8
"""GPUs of an imagined machine where `--gpus` does not say."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only `plan` has."""
    migrate.add_arguments(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hardware", metavar="FILE", help="plan for a recorded machine (doctor --json)")
    where.add_argument("--gpu", metavar="NAME", help="plan for --gpus of this kind, such as h100-80gb")
    parser.add_argument("--nodes", type=_nodes, default=1, metavar="N", help="machines with --gpus GPUs each")
    parser.add_argument(
        "--fit", action="store_true", help="what fits: longest rows, micro batch, fewest GPUs"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run two steps of the plan on CPU ranks with a small copy of the model (about a minute)",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="check the memory by tracing the model's code (some seconds, no GPU)",
    )


def _nodes(text: str) -> int:
    """Read a number of machines."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_NODES:
        raise argparse.ArgumentTypeError(f"got {text!r}; use a whole number from 1 to {MOST_NODES}")
    return int(text)


def plan_and_print(arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    """Plan, and print the plan with every problem and what became of another tool's file.

    Args:
        arguments: those of `add_arguments`, and `json`.
        given: the settings of the command line and of `--spec`.

    Returns:
        The exit code.

    Raises:
        Refused: the file of another tool cannot be read.
    """
    brought = migrate.Brought(arguments, given)
    spec: TrainingSpec | None = None
    try:
        spec = parse_spec(brought.values)
        if arguments.save is not None:
            save_spec(spec, arguments.save)
        value, text, problems = plan_command(resolve_demo(spec), arguments, brought.problems)
    except Refused as refused:
        problems = brought.blamed([*brought.problems, *refused.problems])
        if arguments.json:
            print_json({**brought.as_json(spec), "problems": [problem.model_dump() for problem in problems]})
        else:
            print(brought.text(spec), end="\n\n" if brought.migration else "", flush=True)
            print_refused(brought.unsaid(problems), False)
        return REFUSED
    problems = brought.blamed(problems)
    if arguments.json:
        if "problems" in value or problems:
            value["problems"] = [problem.model_dump() for problem in problems]
        print_json({**value, **brought.as_json(spec)})
    else:
        parts = (brought.text(spec), text, problems_text(brought.unsaid(problems)))
        print("\n\n".join(part for part in parts if part))
    return REFUSED if any(problem.severity == "error" for problem in problems) else GOOD


def plan_command(
    spec: TrainingSpec, arguments: argparse.Namespace, known: Sequence[Problem] = ()
) -> tuple[dict[str, Any], str, list[Problem]]:
    """Plan and validate.

    Args:
        spec: what was asked.
        arguments: `hardware`, `gpu`, `nodes`, `fit`, `rehearse`, `trace`.
        known: problems that reading the spec found.

    Returns:
        The JSON object, the text for a terminal, and the problems.

    Raises:
        Refused: what cannot be planned.
    """
    hardware = _machine(spec, arguments)
    if arguments.fit:
        try:
            answer = fit(spec, hardware, arguments.nodes)
        except Refused as refused:
            raise with_others(refused, spec) from None
        return {"fit": answer.model_dump(mode="json")}, fit_text(answer), list(known)
    here = arguments.hardware is None and arguments.gpu is None
    plan, found = plan_and_validate(spec, hardware, arguments.nodes, here)
    problems = [*known, *found]
    if arguments.rehearse and not any(problem.severity == "error" for problem in problems):
        problems += _rehearsal(spec, plan)
    value: dict[str, Any] = {
        "plan": plan.model_dump(mode="json", exclude={"memory", "candidates"}),
        "memory": plan.memory.model_dump(mode="json") if plan.memory else None,
        "candidates": [c.model_dump(mode="json") for c in plan.candidates],
        "problems": [problem.model_dump() for problem in problems],
        "launch": launch_preview(spec, hardware, plan),
    }
    text = plan_terminal(plan)
    if spec.launcher.engine == "slurm":
        value["batch_script"] = script_preview(LaunchPlan.model_validate(value["launch"]))
        text += f"\n\nbatch script:\n{value['batch_script']}"
    if spec.launcher.engine == "ray":
        value["request"] = request_preview(LaunchPlan.model_validate(value["launch"]))
        text += f"\n\nrequest to Ray:\n{json.dumps(value['request'], indent=2)}"
    if arguments.trace:
        traced = trace_plan(spec, hardware, plan)
        value["trace"] = traced.model_dump(mode="json")
        text += f"\n\ntrace: {traced.verdict}"
    return value, text, problems


def plan_and_validate(
    spec: TrainingSpec, hardware: Hardware, nodes: int, local: bool
) -> tuple[ShardingPlan, list[Problem]]:
    """Return the plan with what was mended in its notes, and every finding.

    Args:
        spec: what was asked.
        hardware: the machine.
        nodes: machines like it.
        local: whether it is this one.

    Raises:
        Refused: what cannot be planned.
    """
    try:
        machines = nodes if nodes > 1 else spec.nodes
        plan = make_plan(spec, hardware, count_rows(spec), machines, correction=recall(spec, hardware))
    except Refused as refused:
        raise with_others(refused, spec) from None
    plan, mended = apply_fixes(spec, hardware, plan)
    plan = plan.model_copy(update={"notes": (*plan.notes, *mended)})
    return plan, list(validate(spec, hardware, plan, local=local))


def launch_preview(spec: TrainingSpec, hardware: Hardware, plan: ShardingPlan) -> dict[str, Any] | None:
    """Return the command and environment that would start the ranks; None for several machines without a cluster."""
    cluster = spec.launcher.cluster
    if plan.nodes > 1 and cluster is None:
        return None
    paths = RunPaths.of(spec.output_dir, PREVIEW)
    launch = build_launch_plan(
        paths=paths,
        run_id=PREVIEW,
        attempt=1,
        nproc_per_node=plan.ranks_per_node,
        device=plan.device,
        config_path=str(paths.temp / "deepspeed_config.json") if plan.config else None,
        omp_num_threads=spec.launcher.omp_num_threads or max(1, hardware.cpu_cores // plan.ranks_per_node),
        stop_budget_s=spec.launcher.stop_budget_s,
        timeout_s=spec.launcher.timeout_min * 60 if spec.launcher.timeout_min else None,
        cuda_visible_devices=",".join(gpu.uuid for gpu in hardware.gpus[: plan.ranks_per_node])
        if plan.device == "cuda" and cluster is None
        else None,
        nodes=plan.nodes,
        cluster=cluster,
    )
    return launch.model_dump(mode="json")


def script_preview(launch: LaunchPlan) -> str:
    """Return the batch script that would be submitted."""
    return batch_script(launch, os.getcwd(), run_environment())


def request_preview(launch: LaunchPlan) -> dict[str, Any]:
    """Return what would be posted to Ray's dashboard; the cluster's RAY_AUTH_MODE is not asked for."""
    return {
        **submission(launch, os.getcwd(), run_environment(), None),
        "on_each_machine": per_machine(launch),
    }


def _rehearsal(spec: TrainingSpec, plan: ShardingPlan) -> list[Problem]:
    """Rehearse in a temporary folder; a failed rehearsal is a problem like any other."""
    from soup_flows.rehearse import rehearse  # imports Prefect, which takes seconds

    run_id = f"rehearsal-{secrets.token_hex(4)}"
    try:
        return rehearse.fn(spec, plan, Path(tempfile.gettempdir(), f"soup-flows-{run_id}"), run_id)
    except Refused as refused:
        return list(refused.problems)


def _machine(spec: TrainingSpec, arguments: argparse.Namespace) -> Hardware:
    """Return the machine to plan for: recorded, imagined, or this one."""
    if arguments.hardware is not None:
        return read_recorded(arguments.hardware, "--hardware")
    return machine(spec, arguments.gpu)


def machine(spec: TrainingSpec, gpu: str | None) -> Hardware:
    """Return a machine with GPUs of the kind `gpu`, or this one when None."""
    if gpu is not None:
        return imagined(gpu, GPUS_PER_MACHINE if spec.gpus == "auto" else spec.gpus)
    recorded, field = spec.recorded_machine
    if recorded is not None:
        return read_recorded(recorded, field)
    return detect(spec.device, [spec.output_dir, *([spec.nvme_path] if spec.nvme_path else [])])
