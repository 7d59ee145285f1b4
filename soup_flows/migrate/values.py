"""What a table says about a key, and what reading a file gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from soup_flows.errors import Severity

if TYPE_CHECKING:
    from soup_flows.migrate.reading import Reading

NOTHING: Any = object()
"""Stands for a default that needs no saying: the tool's and this package's are the same, or none is needed."""
UNKNOWN: Any = object()
"""Stands for a default of the tool that its documentation, as far as it was read, does not name."""


class NotTaken(ValueError):
    """A value has no counterpart here.

    Attributes:
        fix: what to do instead.
        severity: `error` where the run would be of another kind; `warning` where it is as asked but for this.
        instead: the value that is taken in its place, or `NOTHING`.
    """

    def __init__(
        self, message: str, fix: str = "", severity: Severity = "error", instead: Any = NOTHING
    ) -> None:
        super().__init__(message)
        self.fix, self.severity, self.instead = fix, severity, instead


def plain(value: Any) -> Any:
    """Return a value as it is; the spec checks it."""
    return value


@dataclass(frozen=True)
class To:
    """A key that is a setting here.

    Attributes:
        field: dotted path of the setting.
        read: turns the tool's value into ours; raises `NotTaken`.
        default: what the tool takes where the key is not written, if what is learned depends on it and this
            package's own default is another.
        note: what differs although the key is taken over.
        off: values that say nothing.
    """

    field: str
    read: Callable[[Any], Any] = plain
    default: Any = NOTHING
    note: str = ""
    off: tuple[Any, ...] = (None, "")


@dataclass(frozen=True)
class Part:
    """A key that says something only together with others; a function of the tool reads them.

    Attributes:
        fields: the settings that come of them.
        how: in words.
    """

    fields: tuple[str, ...]
    how: str


@dataclass(frozen=True)
class Without:
    """A key that has no setting here.

    Attributes:
        why: the reason, for a person.
        instead: what to do.
        severity: `error` where the run would be of another kind without it, `warning` where its numbers would
            differ, `note` where nothing that is learned depends on it.
        off: values that ask for nothing, beside an empty one, false, 0, "no" and "none".
    """

    why: str
    instead: str = ""
    severity: Severity = "note"
    off: tuple[Any, ...] = ()


Entry = To | Part | Without


@dataclass(frozen=True)
class Tool:
    """A tool whose config can be read.

    Attributes:
        name: as its authors write it.
        option: the flag of `soup-flows plan` that takes its file.
        source: what the table was made from.
        keys: dotted path of a key -> what becomes of it.
        parts: read the keys that count together; each is called once.
        gpus: GPUs of a run whose file and command line do not say; None where the tool takes all it sees.
        flags: options of its command -> what to give here.
        about: what the table does not have, for the page.
    """

    name: str
    option: str
    source: str
    keys: Mapping[str, Entry]
    parts: tuple[Callable[[Reading], None], ...]
    gpus: int | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    about: str = ""


class Mapped(BaseModel):
    """One setting that was taken over."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[str, ...]
    """Keys of the file that it comes from; those of the tool's defaults too."""
    field: str
    """Dotted path of the setting here."""
    value: Any
    """Its value here."""
    written: bool = True
    """False if the file says nothing, and it is the tool's default."""
    note: str = ""
    """What differs all the same."""
