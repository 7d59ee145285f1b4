"""The command `soup-flows`.

Exit codes: 0 good, 1 the run failed, 2 refused, 3 cancelled or stopped, 4 nothing found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soup_flows.cli_plan import add_arguments, plan_command
from soup_flows.errors import Problem, Refused, TrainingFailed, refuse
from soup_flows.hardware import detect, doctor, render
from soup_flows.presets import explain_difference, presets_table
from soup_flows.spec import TrainingSpec, parse_spec

GOOD, FAILED, REFUSED, STOPPED = 0, 1, 2, 3

_FLAT = (
    "model",
    "dataset",
    "output_dir",
    "deepspeed",
    "fsdp",
    "deepspeed_config",
    "gpus",
    "device",
    "strategy",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `soup-flows --help`.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except Refused as refused:
        if arguments.json:
            _print_json({"problems": [p.model_dump() for p in refused.problems]})
        else:
            print(refused, file=sys.stderr)
        return REFUSED
    except BrokenPipeError:
        return GOOD
    return code


def _parser() -> argparse.ArgumentParser:
    """Build the parser; every command takes `--json`."""
    parser = argparse.ArgumentParser(prog="soup-flows", description=__doc__, formatter_class=_Raw)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, formatter_class=_Raw)
        sub.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")
        sub.set_defaults(run=run)
        return sub

    _spec_arguments(command("train", _train, "Run the flow soup-train here."))
    plan = command("plan", _plan, "Show what train would run, or why it would be refused; starts nothing.")
    _spec_arguments(plan)
    add_arguments(plan)
    presets = command("presets", _presets, "List the presets, show one, or compare two.")
    presets.add_argument("preset", nargs="?", help="show this preset's config")
    presets.add_argument("--diff", metavar="PRESET", help="explain the difference to this preset")
    command("doctor", _doctor, "Show this machine's hardware, what is wrong with it and what to do.")
    demo = command("demo", _demo, "Run the flow soup-train on a tiny model, two CPU ranks, about a minute.")
    demo.add_argument("preset", nargs="?", default="zero2", help="a DeepSpeed or FSDP preset, or ddp")
    demo.add_argument("--output-dir", "--output_dir", default="demo-output", metavar="DIR")
    return parser


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions."""


def _spec_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that make a spec: the flat ones by name, everything by --set, a whole one by --spec."""
    fields = TrainingSpec.model_fields
    for name in _FLAT:
        dashed = "--" + name.replace("_", "-")
        flags = dict.fromkeys((dashed, f"--{name}"))
        parser.add_argument(*flags, dest=name, metavar=name.upper(), help=fields[name].description)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="any other setting, such as training.learning_rate=2e-5")  # fmt: skip
    parser.add_argument("--spec", metavar="FILE", help="a whole spec as JSON or YAML; flags win over it")


def read_spec(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a spec: those of the file, then those of `--set`, then those of the flags.

    Raises:
        Refused: for a file that cannot be read or a `--set` without `=`.
    """
    values = _spec_file(arguments.spec) if arguments.spec else {}
    for setting in arguments.settings:
        key, sign, text = setting.partition("=")
        if not sign or not key:
            raise refuse("CLI001", "--set", f"got {setting!r}", "write --set training.learning_rate=2e-5")
        group, name = values, key
        if "." in key:
            head, name = key.split(".", 1)
            group = values.setdefault(head, {})
            if not isinstance(group, dict):
                raise refuse("CLI001", "--set", f"{head!r} is not a group of settings", "see --help")
        group[name] = _value(text)
    values.update({name: getattr(arguments, name) for name in _FLAT if getattr(arguments, name) is not None})
    return values


def _value(text: str) -> Any:
    """Read a value as JSON, else take it as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _spec_file(name: str) -> dict[str, Any]:
    """Read a spec file; YAML is a superset of JSON."""
    import yaml

    try:
        value = yaml.safe_load(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise refuse(
            "CLI002", "--spec", f"{name!r} cannot be read: {error}", "give a JSON or YAML file"
        ) from None
    if not isinstance(value, dict):
        raise refuse("CLI002", "--spec", f"{name!r} holds no settings", "write `model: ...` and so on")
    return value


def _train(arguments: argparse.Namespace) -> int:
    """Run the flow in this process, so that the terminal shows it and Ctrl-C stops it."""
    return run_flow(read_spec(arguments), arguments.json)


def run_flow(values: dict[str, Any], as_json: bool) -> int:
    """Run `soup-train` with `values` and print where everything is; returns the exit code."""
    # The default of 20 s is too short on a loaded machine for Prefect's own server to start.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "300")
    if as_json:
        os.environ["PREFECT_LOGGING_LEVEL"] = "CRITICAL"
    parse_spec(values)  # a wrong spec is refused before Prefect is imported
    from soup_flows.flows import soup_train
    from soup_flows.report import TrainReport

    try:
        report = soup_train(**values)
    except TrainingFailed as failed:
        report = TrainReport.load(failed.run_dir)
        if not as_json:
            print(failed, file=sys.stderr)
    if as_json:
        _print_json(report.model_dump(mode="json"))
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


def _plan(arguments: argparse.Namespace) -> int:
    """Plan and validate; refused plans print every problem."""
    value, text, problems = plan_command(parse_spec(read_spec(arguments)), arguments)
    if arguments.json:
        _print_json(value)
    else:
        print(text)
        _print_problems(problems)
    return REFUSED if any(problem.severity == "error" for problem in problems) else GOOD


def _presets(arguments: argparse.Namespace) -> int:
    """List the presets, show one, or explain two."""
    from soup_flows.deepspeed import DEEPSPEED_ALIASES, DEEPSPEED_PRESETS, get_deepspeed_config
    from soup_flows.fsdp import get_fsdp_config

    name = arguments.preset
    if name is None:
        rows = presets_table()
        if arguments.json:
            _print_json({"presets": [row.model_dump() for row in rows]})
        else:
            width = max(len(row.name) for row in rows)
            print("\n".join(f"{row.name:<{width}}  {row.when}" for row in rows))
    elif arguments.diff:
        text = explain_difference(name, arguments.diff)
        if arguments.json:
            _print_json({"difference": text})
        else:
            print(text)
    else:
        known = {*DEEPSPEED_PRESETS, *DEEPSPEED_ALIASES}
        _print_json(get_deepspeed_config(name) if name in known else get_fsdp_config(name))
    return GOOD


def _doctor(arguments: argparse.Namespace) -> int:
    """Show the hardware; errors make the exit code 1."""
    hardware = detect("auto", ["."])
    problems = doctor(hardware)
    if arguments.json:
        _print_json(
            {"hardware": hardware.model_dump(mode="json"), "problems": [p.model_dump() for p in problems]}
        )
    else:
        print(render(hardware, problems))
    return FAILED if any(problem.severity == "error" for problem in problems) else GOOD


def _demo(arguments: argparse.Namespace) -> int:
    """Run the demo under the named preset."""
    from soup_flows.demo import demo_parameters

    return run_flow(demo_parameters(arguments.preset, arguments.output_dir), arguments.json)


def _print_problems(problems: Sequence[Problem]) -> None:
    """Print the problems, errors first."""
    for problem in problems:
        print(f"{problem.severity:<8} {problem}")


def _print_json(value: Any) -> None:
    """Print one JSON object."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
