"""Reads YAML files that a user names, and says precisely what is wrong with them."""

from __future__ import annotations

import os
from typing import Any

import yaml

from soup_flows.json_text import whole_text
from soup_flows.user_file import BadFile, read_text

MAX_DEPTH = 20
"""Deepest nesting that is read; real files have two or three levels."""


def read_yaml(path: str | os.PathLike[str], max_bytes: int) -> dict[str, Any]:
    """Return the mapping in a YAML file; JSON is YAML too.

    Raises:
        BadFile: the file cannot be read, is larger than `max_bytes`, is no plain YAML, holds a key twice or a
            reference, or is no mapping.
    """
    text = read_text(path, max_bytes)
    try:
        value = yaml.load(text, Loader=_Strict)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1} column {mark.column + 1}: " if mark else ""
        raise BadFile(path, f"{where}{error.problem}", "write plain YAML") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadFile(path, f"cannot be parsed: {type(error).__name__}", "write plain YAML") from None
    if not isinstance(value, dict):
        raise BadFile(path, "holds no settings", "write `name: value` lines")
    return {str(key): item for key, item in value.items()}


class _Strict(yaml.SafeLoader):
    """A safe loader that refuses a key that is there twice, references, and nesting without end."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="references (*name) are not read", problem_mark=mark)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Join the two escapes that JSON writes for one sign beyond U+FFFF, which PyYAML leaves apart."""
        node = super().compose_scalar_node(anchor)
        try:
            node.value = whole_text(node.value)
        except UnicodeError:
            problem = "half of a UTF-16 pair"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                problem = f"the key {key!r} is there twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Say where a value is that its tag, or what it looks like, cannot make: `!!int ''`, `2001-99-99`."""
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            problem = f"{node.value[:40]!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
