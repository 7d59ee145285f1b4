"""The command: `python -m benchmarks [NAME] [options]`; all of them one after the other without a name."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.page import PARTS, write


def main(argv: list[str] | None = None) -> int:
    """Run what was asked; every result is kept below benchmarks/results, and the page is written anew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(dest="name", metavar="NAME")
    for name, (title, module, _) in PARTS.items():
        command = commands.add_parser(
            name, help=title, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.add_argument("--add", action="store_true", help="keep the rows that are there")
        command.add_argument("--work", type=Path, default=ROOT / "build" / "benchmarks", help="made data")
        command.set_defaults(run=module.run)
    commands.add_parser("page", help="write docs/benchmarks.md from the kept results")
    chosen = parser.parse_args(argv)
    asked = [parser.parse_args([name]) for name in PARTS] if chosen.name is None else [chosen]
    for arguments in asked:
        if arguments.run is not None:
            arguments.run(arguments)
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
