"""Reads one file by the table of its tool; every key ends up taken over, off, or as a problem that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from soup_flows.errors import Problem, Severity, nearest
from soup_flows.migrate.values import NOTHING, UNKNOWN, Mapped, NotTaken, Part, To, Tool, Without
from soup_flows.other_words import OTHER_WORDS
from soup_flows.spec import Group, TrainingSpec


def settings() -> dict[str, Any]:
    """Return every setting of a spec: dotted path -> its default."""
    found: dict[str, Any] = {}
    for name, field in TrainingSpec.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(default, Group):
            found |= {f"{name}.{inner}": getattr(default, inner) for inner in type(default).model_fields}
        else:
            found[name] = default
    return found


SETTINGS = settings()


def is_off(value: Any, more: tuple[Any, ...] = ()) -> bool:
    """Whether a value asks for nothing."""
    if isinstance(value, str):
        return value.strip().lower() in ("", "no", "none", "false", "null") or value in more
    return not value or any(value == item for item in more)


def flat(values: Mapping[str, Any], whole: Callable[[str], bool], above: str = "") -> dict[str, Any]:
    """Return dotted paths and their values; a mapping for which `whole(path)` holds stays one value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and value and not whole(path):
            found |= flat(value, whole, f"{path}.")
        else:
            found[path] = value
    return found


class Reading:
    """A file on its way to a spec.

    Attributes:
        values: dotted key of the file -> value.
        spec: dotted setting -> value, as far as it is read.
        mapped: what was taken over.
        off: keys that are empty or turned off.
        problems: what could not be taken over, or differs.
    """

    def __init__(self, tool: Tool, values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self.tool = tool
        groups = {key[: i + 1] for key in tool.keys for i, letter in enumerate(key) if letter == "."}
        self.values = flat(values, lambda path: f"{path}." not in groups)
        self.given = flat(given, lambda path: path in SETTINGS)
        self.groups = groups
        self.spec: dict[str, Any] = {}
        self.mapped: list[Mapped] = []
        self.off: list[str] = []
        self.problems: list[Problem] = []
        self._settled: set[str] = set()

    def run(self) -> None:
        """Read every key, then what several say together, then what the tool takes for those not written."""
        for key, entry in self.tool.keys.items():
            if isinstance(entry, To) and key in self.values:
                self._take(key, entry)
        for part in self.tool.parts:
            part(self)
        self._defaults()
        for key, value in self.values.items():
            if key not in self._settled:
                self._leave(key, value)

    def written(self, key: str) -> bool:
        """Whether the file says something for a key."""
        return not is_off(self.values.get(key)) or self.values.get(key) == 0

    def asked(self, key: str) -> bool:
        """Whether a key is there and turned on."""
        return not is_off(self.values.get(key))

    def decided(self, field: str) -> bool:
        """Whether the command line says a setting itself; it wins."""
        return field in self.given

    def read(self, key: str, convert: Callable[[Any], Any], field: str, default: Any = NOTHING) -> Any:
        """Return the value of a key of a part, `default` where it is not written or has no counterpart.

        Args:
            key: of the file.
            convert: raises `NotTaken`.
            field: the setting that it leads to, for messages.
            default: see above.
        """
        if not self.written(key):
            return default
        try:
            return convert(self.values[key])
        except NotTaken as wrong:
            self.wrong(key, wrong, field)
            return default if wrong.instead is NOTHING else wrong.instead

    def put(
        self, field: str, value: Any, *keys: str, written: bool = True, note: str = "", over: bool = False
    ) -> None:
        """Take a setting over; a second value is a contradiction, unless it is meant to be laid `over` the first."""
        assert field in SETTINGS, field  # the tables are tested for it
        self._settled |= set(keys)
        if over and field in self.spec:
            keys += next(m for m in self.mapped if m.field == field).keys
            self.mapped = [m for m in self.mapped if m.field != field]
        elif field in self.spec and self.spec[field] != value:
            before = next(m for m in self.mapped if m.field == field)
            message = f"{keys[0]} says {value!r} and {', '.join(before.keys)} says {before.value!r}"
            self.say(keys[0], "MIG007", "error", message, "keep one of them")
            return
        self.spec[field] = value
        self.mapped.append(Mapped(keys=keys, field=field, value=value, written=written, note=note))

    def say(self, key: str, rule: str, severity: Severity, message: str, fix: str = "") -> None:
        """Add a problem about a key of the file."""
        self._settled.add(key)
        problem = Problem(
            id=rule, severity=severity, field=f"{self.tool.option}.{key}", message=message, fix=fix,
            source=self.tool.source,
        )  # fmt: skip
        if problem not in self.problems:
            self.problems.append(problem)

    def wrong(self, key: str, wrong: NotTaken, field: str) -> None:
        """Add the problem of a value without counterpart; a note where the command line says the setting itself."""
        severity, message = wrong.severity, f"{key}: {wrong}"
        if self.decided(field):
            severity, message = "note", f"{message}; the command line says {field} itself"
        rule = "MIG006" if wrong.severity == "warning" else "MIG005"
        self.say(key, rule, severity, message, wrong.fix)

    def settle(self, *keys: str) -> None:
        """Mark keys that a part has read to no effect, because they say what holds anyway."""
        self._settled |= set(keys)
        self.off += [key for key in keys if key in self.values]

    def _take(self, key: str, entry: To) -> None:
        value = self.values[key]
        if any(value is item or value == item for item in entry.off):
            self.settle(key)
            return
        try:
            found = entry.read(value)
        except NotTaken as wrong:
            self.wrong(key, wrong, entry.field)
            if wrong.instead is NOTHING:
                return
            found = wrong.instead
        if found is None:
            self.settle(key)
        else:
            self.put(entry.field, found, key, note=entry.note)

    def _defaults(self) -> None:
        """Take the tool's defaults where they are others; name those that are not known."""
        unknown = []
        for key, entry in self.tool.keys.items():
            if not isinstance(entry, To) or entry.field in self.spec or self.decided(entry.field):
                continue
            if entry.default is UNKNOWN and key not in self.values and self._matters(entry.field):
                unknown.append(f"{key} (here {entry.field} = {SETTINGS[entry.field]!r})")
            elif entry.default is not NOTHING and entry.default is not UNKNOWN and self._matters(entry.field):
                self.put(entry.field, entry.default, key, written=False)
        if unknown:
            message = f"not in the file, and {self.tool.name}'s default is not known to this reader: "
            fix = "write them into the file, or give the settings here"
            self.say("defaults", "MIG006", "warning", message + ", ".join(unknown), fix)

    def _matters(self, field: str) -> bool:
        """Whether a setting has an effect: those of adapters have none on full training."""
        full = self.spec.get("training.method", self.given.get("training.method", "full")) == "full"
        return not (field.startswith("lora.") and full)

    def _leave(self, key: str, value: Any) -> None:
        """Say why a key is not taken over."""
        entry = self.tool.keys.get(key)
        if isinstance(entry, Without):
            if is_off(value, entry.off):
                self.settle(key)
            else:
                rule = {"error": "MIG004", "warning": "MIG006", "note": "MIG003"}[entry.severity]
                self.say(key, rule, entry.severity, f"{key}: {entry.why}", entry.instead)
        elif isinstance(entry, To | Part) and is_off(value):
            self.settle(key)
        elif isinstance(entry, To | Part):
            self.say(key, "MIG006", "warning", f"{key} says nothing beside the other keys of this file")
        elif f"{key}." in self.groups:
            if value in (None, {}):
                self.settle(key)
            else:
                self.say(key, "MIG005", "error", f"{key} is {value!r}", "write a group of settings")
        else:
            message = f"{key} is not a key that this reader knows from {self.tool.name}"
            self.say(key, "MIG002", "error", message, self._hint(key))

    def _hint(self, key: str) -> str:
        """Name the nearest key of the tool, and the setting that other tools call so."""
        last = key.rsplit(".", 1)[-1]
        near = nearest(key, self.tool.keys) or nearest(last, self.tool.keys)
        same = [path for path in SETTINGS if path.rsplit(".", 1)[-1] == last]
        word = OTHER_WORDS.get(last) or (same[0] if len(same) == 1 else "")
        parts = [near, f"here it may be {word}" if word else ""]
        return "; ".join(part for part in parts if part) or "remove it"
