"""The commands that make a run or explain one: the flow itself, `drill` and `diagnose`."""

# ruff: noqa: T201 (a command prints)

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from soup_flows.errors import Problem, TrainingFailed
from soup_flows.run_lock import check_can_be_made
from soup_flows.spec import parse_spec
from soup_flows.terminal import problems_text

GOOD, FAILED, REFUSED, STOPPED, NOTHING = 0, 1, 2, 3, 4

DRILL_TEXT = (
    "Make a tiny real run on two CPU ranks suffer, and check that it ends with the right class and leaves "
    "nothing."
)


def add_commands(command: Callable[[str, Any, str], argparse.ArgumentParser]) -> None:
    """Add the commands; `command(name, function, text)` makes a parser that has `--json` already."""
    diagnosis = command("diagnose", _diagnose, "Explain how a run ended and why, from its folder alone.")
    diagnosis.add_argument("run_dir", metavar="RUN_DIR", help="<output folder>/runs/<run id>")
    drill = command("drill", _drill, DRILL_TEXT)
    drill.add_argument("names", metavar="NAME", nargs="*", help="drills, or all; listed without a name")
    drill.add_argument("--output-dir", "--output_dir", default="drill-output", metavar="DIR")
    drill.add_argument("--quick", action="store_true", help="ranks that only pretend to train, without torch")


def print_refused(problems: Sequence[Problem], as_json: bool) -> None:
    """Print why nothing was started."""
    if as_json:
        print_json({"problems": [problem.model_dump() for problem in problems]})
    else:
        errors = sum(problem.severity == "error" for problem in problems)
        print(f"refused: {errors} problem(s)\n{problems_text(problems)}", file=sys.stderr)


def run_flow(values: dict[str, Any], as_json: bool) -> int:
    """Run `soup-train` with `values` and print where everything is; returns the exit code."""
    # The default of 20 s is too short on a loaded machine for Prefect's own server to start.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "300")
    if as_json:
        os.environ["PREFECT_LOGGING_LEVEL"] = "CRITICAL"
    spec = parse_spec(values)  # a wrong spec is refused before Prefect is imported
    check_can_be_made(spec.output_dir)
    if not as_json:
        print(
            "Starting the flow; without PREFECT_API_URL, Prefect starts a server for it first.",
            file=sys.stderr,
        )
    from soup_flows.block_use import apply_blocks
    from soup_flows.flows import soup_train
    from soup_flows.paths import RunPaths
    from soup_flows.report import TrainReport

    try:
        state = soup_train(**values, return_state=True)
        if state.is_cancelled():
            report = TrainReport.load(
                RunPaths.of(apply_blocks(spec).output_dir, str(state.state_details.flow_run_id)).root
            )
            if not as_json:
                print(state.message, file=sys.stderr)
        else:
            report = cast(TrainReport, state.result())
    except TrainingFailed as failed:
        report = TrainReport.load(failed.run_dir)
        if not as_json:
            print(failed, file=sys.stderr)
    if as_json:
        print_json(report.model_dump(mode="json"))
    elif report.state == "completed":
        print(_closing(report))
    return {"completed": GOOD, "cancelled": STOPPED, "refused": REFUSED}.get(report.state, FAILED)


def _closing(report: Any) -> str:
    """Say where the model, the report and the pages are."""
    losses = f"loss {report.first_loss:.3f} -> {report.final_loss:.3f}"
    if report.evaluations:
        losses += f", held-out loss {report.first_eval_loss:.3f} -> {report.eval_loss:.3f}"
    return "\n".join(
        (
            "",
            f"Done: {report.steps} steps of {report.plan.strategy} on {report.plan.world_size} rank(s); {losses}",
            f"Model      {report.model}",
            f"Report     {report.run_dir}/report.json",
            f"Logs       {report.run_dir}/attempt-{report.attempts}/logs/",
            "Artifacts  soup-train-config and soup-train-report, in the run's tab Artifacts in Prefect",
            "Page       start `prefect server start`, then open "
            f"http://127.0.0.1:4200/runs/flow-run/{report.run_id}",
        )
    )


def _diagnose(arguments: argparse.Namespace) -> int:
    """Explain a run."""
    from soup_flows.diagnose import diagnose, diagnosis_text

    try:
        found = diagnose(arguments.run_dir)
    except FileNotFoundError as error:
        if arguments.json:
            print_json({"error": str(error)})
        else:
            print(error, file=sys.stderr)
        return NOTHING
    if arguments.json:
        print_json(found.model_dump(mode="json"))
    else:
        print(diagnosis_text(found))
    return GOOD


def _drill(arguments: argparse.Namespace) -> int:
    """Run drills; the exit code is 1 unless in each the class was right and nothing was left."""
    from soup_flows.drill import drill_text, drills
    from soup_flows.drill.cases import DRILLS

    if not arguments.names:
        rows = {name: case.text for name, case in DRILLS.items()}
        if arguments.json:
            print_json({"drills": rows})
        else:
            print("\n".join(f"{name:<16}  {text}" for name, text in rows.items()))
        return GOOD
    names = arguments.names
    if names == ["all"]:
        names = [name for name, case in DRILLS.items() if case.quick or not arguments.quick]
    results = []
    for result in drills(names, arguments.output_dir, quick=arguments.quick):
        results.append(result)
        if not arguments.json:
            print(drill_text(result), flush=True)
    if arguments.json:
        values = [result.model_dump(mode="json") for result in results]
        print_json(values[0] if len(names) == 1 else {"results": values})
    return GOOD if all(result.passed for result in results) else FAILED


def print_json(value: Any) -> None:
    """Print one JSON object."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
