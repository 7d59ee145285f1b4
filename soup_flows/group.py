"""What every group of settings is: frozen, strict about unknown keys, and true is no number."""

from __future__ import annotations

import typing

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

MANY = 10**9
"""Largest count of steps, rows and the like: beyond it a number is a mistake."""


def _takes_bool(annotation: object) -> bool:
    """Whether a type is bool, or has it among its alternatives."""
    return annotation is bool or any(_takes_bool(inner) for inner in typing.get_args(annotation))


class Group(BaseModel):
    """Base of the spec and its groups: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false where they would count as 1 and 0."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and not _takes_bool(field.annotation):
            raise PydanticCustomError("bool_as_number", "true and false are no value here")
        return value
