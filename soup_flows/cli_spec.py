"""The command line's parser, and the flags that make a spec."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn

from soup_flows.cli_runs import REFUSED, print_refused
from soup_flows.errors import Problem, refuse
from soup_flows.spec import TrainingSpec
from soup_flows.spec_file import read_spec_file

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


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line as every other refusal is said, as JSON too where that was asked for."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Remember whether JSON was asked for."""
        self.as_json = "--json" in (sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with the exit code of a refusal."""
        fix = f"see {self.prog} --help"
        problem = Problem(id="CLI005", severity="error", field="command line", message=message, fix=fix)
        print_refused([problem], getattr(self, "as_json", False))
        raise SystemExit(REFUSED)


class Version(argparse.Action):
    """Looks the version up when it is asked for, and not at every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print it and end."""
        from soup_flows.manifest import library_versions

        sys.stdout.write(f"soup-flows {library_versions().get('soup-flows', 'from a checkout')}\n")
        parser.exit()


class Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions."""


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
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
    values = read_spec_file(arguments.spec, "--spec") if arguments.spec else {}
    for setting in arguments.settings:
        key, sign, text = setting.partition("=")
        if not sign or not key:
            raise refuse("CLI001", "--set", f"got {setting!r}", "write --set training.learning_rate=2e-5")
        group = values
        *heads, name = key.split(".")
        for head in heads:
            group = group.setdefault(head, {})
            if not isinstance(group, dict):
                raise refuse("CLI001", "--set", f"{head!r} is not a group of settings", "see --help")
        group[name] = value_of(text)
    values.update({name: getattr(arguments, name) for name in _FLAT if getattr(arguments, name) is not None})
    return values


def value_of(text: str) -> Any:
    """Read a value as JSON, else take it as text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
