"""Multi-GPU LLM fine-tuning, planned, proven and supervised.

exit codes:
  0  good
  1  the run failed, or a check did
  2  refused: problems were found before anything was started, or the command line is wrong
  3  cancelled or stopped
  4  nothing found
Every command takes --json: one JSON object on stdout, and nothing else there.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Sequence
from typing import Any

from soup_flows import cli_deploy
from soup_flows.cli_completion import COMPLETION_TEXT, SHELLS, completion_script
from soup_flows.cli_plan import add_arguments, plan_and_print
from soup_flows.cli_runs import (
    FAILED,
    GOOD,
    NOTHING,
    REFUSED,
    add_commands,
    print_json,
    print_refused,
    run_flow,
)
from soup_flows.cli_spec import Parser, Raw, Version, add_spec_arguments, read_spec
from soup_flows.data import command as data_command
from soup_flows.demo import demo_parameters, resolve_demo
from soup_flows.errors import Refused, nearest, refuse
from soup_flows.hardware import detect, doctor, render
from soup_flows.presets import explain_difference, presets_table
from soup_flows.spec import parse_spec
from soup_flows.validation.explain import explain, is_known

DEPLOY_TEXT = (
    "Register work pool, blocks, deployments and automations on the Prefect server; doing it twice changes "
    "nothing. The flags of a spec become the parameters of soup-train/nightly."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `soup-flows --help`.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["data"]:
        return data_command.main(given[1:])
    arguments = _parser().parse_args(given)
    try:
        code: int = arguments.run(arguments)
    except Refused as refused:
        print_refused(refused.problems, arguments.json)
        return NOTHING if refused.problems[0].id == "STOP001" else REFUSED
    except BrokenPipeError:
        return GOOD
    return code


def _parser() -> argparse.ArgumentParser:
    """Build the parser; every command takes `--json`."""
    parser = Parser(prog="soup-flows", description=__doc__, formatter_class=Raw)
    parser.add_argument("--version", action=Version, nargs=0, help="show the version and end")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, formatter_class=Raw)
        sub.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")
        sub.set_defaults(run=run)
        return sub

    add_spec_arguments(command("train", _train, "Run the flow soup-train here."))
    plan = command("plan", _plan, "Show what train would run, or why it would be refused; starts nothing.")
    add_spec_arguments(plan)
    add_arguments(plan)
    presets = command("presets", _presets, "List the presets, show one, or compare two.")
    presets.add_argument("preset", nargs="?", help="show this preset's config")
    presets.add_argument("--diff", metavar="PRESET", help="explain the difference to this preset")
    data = command("data", None, "Report on a data file before it is trained; see soup-flows data --help.")
    data_command.add_arguments(data)
    explain = command("explain", _explain, "Tell what a rule is about: why, the fix, the evidence.")
    explain.add_argument("rule", help="an id such as DS014")
    command("doctor", _doctor, "Show this machine's hardware, what is wrong with it and what to do.")
    add_commands(command)
    deployed = command("deploy", _deploy, DEPLOY_TEXT)
    cli_deploy.add_arguments(deployed)
    add_spec_arguments(deployed)
    stop = command("stop", _stop, "Ask a running training to stop.")
    stop.add_argument("run_dir", help="its run directory, <output_dir>/runs/<run id>")
    stop.add_argument("--save", action="store_true", help="save a checkpoint after the present step first")
    demo = command("demo", _demo, "Run the flow soup-train on a tiny model, two CPU ranks, about a minute.")
    demo.add_argument("preset", nargs="?", default="zero2", help="a DeepSpeed or FSDP preset, or ddp")
    demo.add_argument("--output-dir", "--output_dir", default="demo-output", metavar="DIR")
    shards = command("consolidate", _consolidate, "Write the shards of a checkpoint as one model folder.")
    shards.add_argument(
        "checkpoint", help="folder of a DCP, FSDP or ZeRO checkpoint, or pytorch_model_fsdp.bin"
    )
    shards.add_argument("-o", "--output", required=True, metavar="OUT", help="the folder to write")
    shards.add_argument("--model", metavar="DIR", help="folder with config.json and the tokenizer")
    shards.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="dtype of the output")
    command("completion", _completion, COMPLETION_TEXT).add_argument("shell", choices=SHELLS)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    """Run the flow in this process, so that the terminal shows it and Ctrl-C stops it."""
    return run_flow(read_spec(arguments), arguments.json)


def _plan(arguments: argparse.Namespace) -> int:
    """Plan and validate; refused plans print every problem."""
    return plan_and_print(arguments, read_spec(arguments))


def _deploy(arguments: argparse.Namespace) -> int:
    """Register everything; what a spec says becomes the nightly run's parameters."""
    return cli_deploy.deploy_command(arguments, read_spec(arguments))


def _explain(arguments: argparse.Namespace) -> int:
    """Print what is known about a rule; an unknown id names the nearest."""
    if not is_known(arguments.rule):
        raise refuse("CLI004", "rule", explain(arguments.rule), "see docs/rules.md")
    text = explain(arguments.rule)
    if arguments.json:
        print_json({"id": arguments.rule, "text": text})
    else:
        print(text)
    return GOOD


def _presets(arguments: argparse.Namespace) -> int:
    """List the presets, show one, or explain two."""
    from soup_flows.deepspeed import DEEPSPEED_ALIASES, DEEPSPEED_PRESETS, get_deepspeed_config
    from soup_flows.fsdp import FSDP_PRESETS, get_fsdp_config

    name = arguments.preset
    if name is None:
        rows = presets_table()
        if arguments.json:
            print_json({"presets": [row.model_dump() for row in rows]})
        else:
            width = max(len(row.name) for row in rows)
            print("\n".join(f"{row.name:<{width}}  {row.when}" for row in rows))
    elif arguments.diff:
        text = explain_difference(name, arguments.diff)
        if arguments.json:
            print_json({"difference": text})
        else:
            print(text)
    else:
        known = {*DEEPSPEED_PRESETS, *DEEPSPEED_ALIASES}
        if name not in known and name not in FSDP_PRESETS:
            near = (
                nearest(name, [*known, *FSDP_PRESETS])
                or f"presets: {', '.join([*sorted(known), *FSDP_PRESETS])}"
            )
            raise refuse("CLI006", "preset", f"there is no preset {name!r}", near)
        print_json(get_deepspeed_config(name) if name in known else get_fsdp_config(name))
    return GOOD


def _doctor(arguments: argparse.Namespace) -> int:
    """Show the hardware; errors make the exit code 1."""
    hardware = detect("auto", ["."])
    problems = doctor(hardware)
    if arguments.json:
        print_json(
            {"hardware": hardware.model_dump(mode="json"), "problems": [p.model_dump() for p in problems]}
        )
    else:
        print(render(hardware, problems))
    return FAILED if any(problem.severity == "error" for problem in problems) else GOOD


def _consolidate(arguments: argparse.Namespace) -> int:
    """Consolidate a checkpoint and say what was written."""
    from soup_flows.consolidate import consolidate

    found = consolidate(arguments.checkpoint, arguments.output, model=arguments.model, dtype=arguments.dtype)
    if arguments.json:
        print_json(found.model_dump())
    else:
        what = "an adapter" if found.adapter else "a model"
        checked = "compared with the config" if found.checked else "not compared: no config.json was found"
        print(f"{found.output}: {what}, {found.tensors} tensors, {found.bytes / 2**30:.2f} GiB; {checked}")
    return GOOD


def _completion(arguments: argparse.Namespace) -> int:
    """Print the script; with `eval` it is of use at once."""
    script = completion_script(_parser(), arguments.shell)
    print_json({"script": script}) if arguments.json else print(script)
    return GOOD


def _stop(arguments: argparse.Namespace) -> int:
    """Write the request; the run sees it within seconds."""
    from soup_flows.stop import stop

    request = stop(arguments.run_dir, arguments.save)
    if arguments.json:
        print_json(request.model_dump())
    else:
        after = "after its present step, with a checkpoint" if request.save else "within seconds"
        print(f"Asked the run in {request.run_dir} to stop {after}.")
    return GOOD


def _demo(arguments: argparse.Namespace) -> int:
    """Run the demo under the named preset; its model is built while Prefect's server starts."""
    values = demo_parameters(arguments.preset, arguments.output_dir)
    spec = parse_spec(values)

    def build() -> None:
        with contextlib.suppress(Exception):  # the flow builds it again and says what is wrong
            resolve_demo(spec)

    threading.Thread(target=build, daemon=True, name="soup-build-demo").start()
    return run_flow(values, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
