"""What `soup-flows plan` does with files of other tools."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from soup_flows.accelerate_config import read_accelerate_config
from soup_flows.errors import Problem
from soup_flows.migrate.read import TOOLS, Migration, blame, migration_text, read_config, spec_yaml
from soup_flows.migrate.reading import SETTINGS, flat
from soup_flows.spec import TrainingSpec
from soup_flows.spec_file import merge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each tool, and `--save`."""
    parser.add_argument("--accelerate-config", metavar="FILE", help="take the settings of an accelerate YAML")
    files = parser.add_mutually_exclusive_group()
    for tool in TOOLS:
        files.add_argument(
            tool.option, metavar="FILE", help=f"take the settings of a {tool.name} YAML; flags win"
        )
    parser.add_argument(
        "--save", metavar="FILE", help="write what was asked as a spec, for --spec; FILE is new"
    )


class Brought:
    """The settings of the files of other tools, and what they could not say.

    Attributes:
        values: those settings, with the command line's over them.
        problems: what was found, errors first within each file.
        migration: what became of the file of a tool, if one was given.
    """

    def __init__(self, arguments: argparse.Namespace, given: Mapping[str, Any]) -> None:
        """Read the files.

        Args:
            arguments: `accelerate_config` and the flag of each tool.
            given: the settings of the command line and of `--spec`.

        Raises:
            Refused: a file cannot be read.
        """
        self.values, self.problems = dict(given), list[Problem]()
        if arguments.accelerate_config:
            found, self.problems = read_accelerate_config(arguments.accelerate_config)
            self.values = merge(found, given)
        self._above = self.values
        self.migration: Migration | None = None
        for tool in TOOLS:
            file = getattr(arguments, tool.option.removeprefix("--").replace("-", "_"))
            if file is not None:
                self.migration = read_config(tool, file, self.values)
                self.problems += self.migration.not_mapped
                self.values = merge(self.migration.values, self.values)

    def blamed(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return problems that name the key of the file their setting comes from."""
        return blame(problems, self.migration) if self.migration else list(problems)

    def unsaid(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems that `text` does not show."""
        said = self.migration.not_mapped if self.migration else ()
        return [problem for problem in problems if problem not in said]

    def text(self, spec: TrainingSpec | None) -> str:
        """Return what became of the file, for a terminal; empty without one."""
        if self.migration is None:
            return ""
        return migration_text(self.migration, flat(self._above, lambda path: path in SETTINGS), spec)

    def as_json(self, spec: TrainingSpec | None) -> dict[str, Any]:
        """Return what became of the file as the key `migration`; empty without one."""
        if self.migration is None:
            return {}
        value = self.migration.model_dump(mode="json", exclude={"values"})
        value["spec"] = spec.model_dump(mode="json", exclude_unset=True) if spec else None
        value["spec_yaml"] = spec_yaml(spec) if spec else None
        return {"migration": value}
