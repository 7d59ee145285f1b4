"""From a file of another tool to settings, with everything that was and was not taken over."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from soup_flows.errors import Problem, Severity, printable, refuse
from soup_flows.migrate.axolotl import AXOLOTL
from soup_flows.migrate.llama_factory import LLAMA_FACTORY
from soup_flows.migrate.reading import Reading
from soup_flows.migrate.soup import SOUP
from soup_flows.migrate.values import Mapped, Tool
from soup_flows.paths import write_atomic
from soup_flows.spec import TrainingSpec
from soup_flows.terminal import problems_text
from soup_flows.user_file import BadFile, expanded
from soup_flows.user_yaml import read_yaml

TOOLS: tuple[Tool, ...] = (SOUP, AXOLOTL, LLAMA_FACTORY)
MAX_BYTES = 64 * 1024
"""Largest file that is read, bytes; the tools' own examples have up to five kilobytes."""
ORDER: tuple[Severity, ...] = ("error", "warning", "note")


class Migration(BaseModel):
    """What became of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool: str
    """Name of the tool."""
    file: str
    """The path that was given."""
    mapped: tuple[Mapped, ...]
    """Settings that were taken over, in the order of the table."""
    off: tuple[str, ...]
    """Keys that are empty or turned off, or say what holds here anyway."""
    not_mapped: tuple[Problem, ...]
    """Keys that were not taken over, or not quite; errors first."""
    values: dict[str, Any]
    """The settings, nested as in a spec; the command line's own are not among them."""


def read_config(tool: Tool, path: str | os.PathLike[str], given: Mapping[str, Any]) -> Migration:
    """Read a config of another tool.

    Args:
        tool: one of `TOOLS`.
        path: a regular file with one mapping.
        given: what the command line says besides; it wins, and the batch is counted for its `gpus`.

    Raises:
        Refused: the file cannot be read or holds no mapping.
    """
    try:
        values = read_yaml(expanded(path), MAX_BYTES)
    except BadFile as bad:
        raise refuse("MIG001", tool.option, str(bad), bad.fix) from None
    return migrate(tool, os.fspath(path), values, given)


def migrate(tool: Tool, file: str, values: Mapping[str, Any], given: Mapping[str, Any]) -> Migration:
    """Return what becomes of the values of a file; as `read_config`, for what is read already."""
    reading = Reading(tool, values, given)
    reading.run()
    keys = [*tool.keys]
    return Migration(
        tool=tool.name,
        file=file,
        mapped=tuple(sorted(reading.mapped, key=lambda m: keys.index(m.keys[0]) if m.keys[0] in keys else 0)),
        off=tuple(dict.fromkeys(reading.off)),
        not_mapped=tuple(sorted(reading.problems, key=lambda p: ORDER.index(p.severity))),
        values=_nested(reading.spec),
    )


def _nested(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups of dotted settings."""
    found: dict[str, Any] = {}
    for path, value in spec.items():
        group, _, name = path.rpartition(".")
        (found.setdefault(group, {}) if group else found)[name] = value
    return found


def spec_yaml(spec: TrainingSpec) -> str:
    """Return the settings that were given, not the defaults, as a file for `--spec`; ASCII."""
    values = spec.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(values, sort_keys=False, width=100)


def save_spec(spec: TrainingSpec, path: str) -> None:
    """Write the settings as a file for `--spec`.

    Raises:
        Refused: the file is there already, or cannot be written.
    """
    target = expanded(path)
    if os.path.lexists(target):
        raise refuse("MIG008", "--save", f"{path} is there already", "remove it, or give another name")
    try:
        write_atomic(target, spec_yaml(spec))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise refuse(
            "MIG008", "--save", f"{path}: {reason}", "give a path in a folder that is there"
        ) from None


def blame(problems: Sequence[Problem], migration: Migration) -> list[Problem]:
    """Name the key of the file in problems about settings that come from it."""
    keys = {m.field: ", ".join(m.keys) for m in migration.mapped if m.written}
    return [
        problem.model_copy(
            update={"message": f"{problem.message} ({keys[problem.field]} in {migration.file})"}
        )
        if problem.field in keys
        else problem
        for problem in problems
    ]


def migration_text(migration: Migration, given: Mapping[str, Any], spec: TrainingSpec | None) -> str:
    """Return what became of the file, for a terminal.

    Args:
        migration: what reading it gave.
        given: dotted settings of the command line, which win.
        spec: the whole spec, shown as YAML; None if it is refused.
    """
    lines = [f"{migration.file}, a config of {migration.tool}: taken over"]
    pairs = [(", ".join(m.keys) if m.written else f"({m.keys[0]})", m) for m in migration.mapped]
    width = min(max((len(left) for left, _ in pairs), default=0), 44)
    for left, m in pairs:
        notes = [m.note] if m.note else []
        if not m.written and not m.note:
            notes.append(f"not written; {migration.tool}'s default")
        if m.field in given:
            notes.append(f"the command line says {_shown(given[m.field])}")
        right = f"{m.field} = {_shown(m.value)}" + (f"    # {'; '.join(notes)}" if notes else "")
        lines.append(f"  {left:<{width}}  {right}")
    if migration.off:
        lines.append(f"empty, off, or so here anyway: {', '.join(migration.off)}")
    if migration.not_mapped:
        lines += ["", "not taken over, or not quite:", problems_text(migration.not_mapped)]
    if spec is not None:
        lines += ["", "the same as a spec, for --spec FILE (--save FILE writes it):"]
        lines += [f"  {line}" for line in spec_yaml(spec).splitlines()]
    return printable("\n".join(lines))


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
