"""The commands about runs that were: `diagnose`, and the fault drills that make one."""

# ruff: noqa: T201 (a command prints)

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

GOOD, FAILED, NOTHING = 0, 1, 4

DRILL_TEXT = (
    "Make a tiny real run on two CPU ranks suffer, and check that it ends with the right class and leaves "
    "nothing."
)


def add_commands(command: Callable[[str, Any, str], argparse.ArgumentParser]) -> None:
    """Add the commands; `command(name, function, text)` makes a parser that has `--json` already."""
    diagnosis = command("diagnose", _diagnose, "Explain how a run ended and why, from its folder alone.")
    diagnosis.add_argument("run_dir", metavar="RUN_DIR", help="<output folder>/runs/<run id>")
    drill = command("drill", _drill, DRILL_TEXT)
    drill.add_argument("name", metavar="NAME", nargs="?", help="the drill; all are listed without one")
    drill.add_argument("--output-dir", "--output_dir", default="drill-output", metavar="DIR")
    drill.add_argument("--quick", action="store_true", help="ranks that only pretend to train, without torch")


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
    """Run a drill; the exit code is 1 unless the class was right and nothing was left."""
    from soup_flows.drill import drill, drill_text
    from soup_flows.drill.cases import DRILLS

    if arguments.name is None:
        rows = {name: case.text for name, case in DRILLS.items()}
        if arguments.json:
            print_json({"drills": rows})
        else:
            print("\n".join(f"{name:<16}  {text}" for name, text in rows.items()))
        return GOOD
    result = drill(arguments.name, arguments.output_dir, quick=arguments.quick)
    if arguments.json:
        print_json(result.model_dump(mode="json"))
    else:
        print(drill_text(result))
    return GOOD if result.passed else FAILED


def print_json(value: Any) -> None:
    """Print one JSON object."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
