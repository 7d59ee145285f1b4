"""The command: `python -m benchmarks [NAME] [options]`; all of them one after the other without a name."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.harness import ROOT

NAMES = {
    "throughput": "tokens per second against other trainers",
}


def main(argv: list[str] | None = None) -> int:
    """Run what was asked; every result is kept below benchmarks/results, and the page is written anew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name")
    modules = {}
    for name, about in NAMES.items():
        module = modules[name] = importlib.import_module(f"benchmarks.{name}")
        command = commands.add_parser(
            name, help=about, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.add_argument("--add", action="store_true", help="keep the rows that are there")
        command.add_argument("--work", type=Path, default=ROOT / "build" / "benchmarks", help="made data")
        command.set_defaults(run=module.run)
    chosen = parser.parse_args(argv)
    asked = [chosen] if chosen.name else [parser.parse_args([name]) for name in NAMES]
    for arguments in asked:
        arguments.run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
