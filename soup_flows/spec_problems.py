"""What is wrong with the values of a spec, in the words of whoever wrote them."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ValidationError

from soup_flows.errors import Problem, nearest
from soup_flows.other_words import OTHER_WORDS

QUOTED = 200
"""Characters of a wrong value that a message quotes."""


def problems_of(error: ValidationError, spec: type[BaseModel]) -> list[Problem]:
    """Turn pydantic's errors into problems, one per field (a union reports one error per branch).

    What contradicts each other is left to the caller: pydantic says it only where every single field is right.

    Args:
        error: what `spec.model_validate` raised.
        spec: the class, whose fields and groups name what is valid.
    """
    by_field: dict[str, Problem] = {}
    for item in error.errors(include_url=False, include_context=True):
        parts = [str(part) for part in item["loc"]]
        field, model, annotation = _locate(parts, spec)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            names = list(model.model_fields)
            message = f"{field!r} is not a setting"
            fix = _right_name(parts, names, spec)
        elif item["type"] == "missing":
            message, fix = "is required", f"give {field}"
        elif not parts:
            continue
        elif item["type"] == "value_error":
            fix = ""
        else:
            message = f"got {_quoted(item['input'])}"
            fix = _elsewhere(parts, item["input"], spec) or _expected(annotation, item["input"], message)
        rule = {"extra_forbidden": "SPEC002", "missing": "SPEC003"}.get(item["type"], "SPEC001")
        by_field.setdefault(field, Problem(id=rule, severity="error", field=field, message=message, fix=fix))
    return list(by_field.values())


def _quoted(value: object) -> str:
    """Return a value as a message quotes it, cut in its middle where it is long."""
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[: QUOTED // 2]}...{text[-QUOTED // 2 :]}"


def _right_name(parts: Sequence[str], names: Sequence[str], spec: type[BaseModel]) -> str:
    """Say what a setting that does not exist is called here: in other tools' words, elsewhere, or nearly so."""
    near = nearest(parts[-1], names)
    known = OTHER_WORDS.get(parts[-1])
    if known is not None and known.split(" ")[0] != ".".join(parts):
        return f"here it is {known}"
    groups = {name: field.annotation for name, field in spec.model_fields.items()}
    homes = [
        f"{name}.{parts[-1]}"
        for name, kind in groups.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel) and parts[-1] in kind.model_fields
    ]
    homes += [parts[-1]] if parts[-1] in spec.model_fields else []
    return f"did you mean {' or '.join(homes)}?" if homes else near or "valid here: " + ", ".join(names)


def _elsewhere(parts: Sequence[str], value: object, spec: type[BaseModel]) -> str:
    """Say which other setting takes a name that was given for this one, such as zero3 for `strategy`."""
    homes = [
        name
        for name, field in spec.model_fields.items()
        if name != parts[0] and len(parts) == 1 and value in _choices(field.annotation)
    ]
    return f"did you mean {homes[0]}={value}?" if homes and isinstance(value, str) and value != "auto" else ""


def _choices(annotation: Any) -> list[object]:
    """Return the names that a type lists."""
    inner = typing.get_args(annotation)
    return (
        list(inner) if typing.get_origin(annotation) is Literal else [c for i in inner for c in _choices(i)]
    )


def _locate(parts: list[str], spec: type[BaseModel]) -> tuple[str, type[BaseModel], Any]:
    """Follow an error location down to its field; what comes after it (a union branch) is dropped."""
    model = spec
    annotation: Any = None
    taken: list[str] = []
    for part in parts:
        taken.append(part)
        field = model.model_fields.get(part)
        if field is None:
            break
        annotation = field.rebuild_annotation()
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return ".".join(taken), model, annotation


def _expected(annotation: Any, value: object, message: str) -> str:
    """Say what a field takes: its choices and its range, with the nearest one to what was given."""
    choices: list[str] = []
    ranges: list[str] = []
    kinds: list[str] = []

    def walk(node: Any) -> None:
        origin = typing.get_origin(node)
        if origin is Literal:
            choices.extend(str(choice) for choice in typing.get_args(node))
        elif origin is Annotated:
            inner, *meta = typing.get_args(node)
            walk(inner)
            ranges.extend(text for item in meta for text in _bounds(item))
        elif origin in (typing.Union, types.UnionType):
            for branch in typing.get_args(node):
                walk(branch)
        elif isinstance(node, type) and node is not type(None):
            words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
            kinds.append(words.get(node, "a group of settings"))

    walk(annotation)
    parts = [" ".join([*kinds, " and ".join(ranges)]).rstrip()] if kinds else []
    if choices:
        parts.append(("one of " if len(choices) > 1 else "") + ", ".join(choices))
    near = nearest(str(value), choices)
    return "use " + " or ".join(parts) + (f"; {near}" if near else "") if parts else message


def _bounds(item: Any) -> list[str]:
    """Return the limits that a `Field(...)` or one of its constraints states."""
    words = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    found = [f"{sign} {getattr(item, name)}" for name, sign in words if getattr(item, name, None) is not None]
    found += ["that is not empty"] if getattr(item, "min_length", None) else []
    return found + [text for inner in getattr(item, "metadata", ()) for text in _bounds(inner)]
