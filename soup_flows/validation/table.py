"""What a rule is, and what it looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from soup_flows.errors import Problem, Severity
from soup_flows.hardware import Hardware
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec
from soup_flows.validation.facts import DataFacts, ModelFacts

T = TypeVar("T")

DEEPSPEED = "deepspeed 0.19.8"
TRANSFORMERS = "transformers 5.24"
ACCELERATE = "accelerate 1.15"
PEFT = "peft 0.21"
ANY = "any version"


@dataclass(frozen=True)
class Context:
    """Everything a rule about a run may look at."""

    spec: TrainingSpec
    hardware: Hardware
    plan: ShardingPlan
    model: ModelFacts
    data: DataFacts
    environ: Mapping[str, str]
    """The environment that the ranks would inherit."""
    local: bool = True
    """Whether this machine is the one that trains; without, packages, folders and variables are not looked at."""

    @property
    def zero(self) -> dict[str, Any]:
        """The `zero_optimization` block of the run's config, empty without DeepSpeed."""
        block = self.plan.config.get("zero_optimization") if self.plan.engine == "deepspeed" else None
        return block if isinstance(block, dict) else {}

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 without DeepSpeed."""
        stage = self.zero.get("stage", 0)
        return stage if isinstance(stage, int) else 0

    @property
    def full(self) -> bool:
        """Whether every weight is trained."""
        return self.spec.training.method == "full"

    def device_of(self, block: str) -> str:
        """Return where `offload_optimizer` or `offload_param` puts things: `none`, `cpu` or `nvme`."""
        values = self.zero.get(block)
        return str(values.get("device", "none")) if isinstance(values, dict) else "none"

    def said(self, group: str, field: str) -> bool:
        """Whether the user chose `group.field`: it was given and is not the default (forms send defaults too)."""
        values = getattr(self.spec, group)
        default = type(values).model_fields[field].default
        return field in values.model_fields_set and getattr(values, field) != default


@dataclass(frozen=True)
class Found:
    """One place where a rule applies.

    Attributes:
        what: what was found, in words that the rule's consequence completes.
        field: the setting, where it is not the rule's own.
        fix: what to write instead, where it is not the rule's own.
    """

    what: str
    field: str = ""
    fix: str = ""


Check = Callable[[T], Iterable[Found]]
Mend = Callable[[Context], tuple[ShardingPlan, str]]


@dataclass(frozen=True)
class Rule(Generic[T]):
    """One thing that is known to fail, to do nothing, or to train wrong.

    `check` yields one `Found` per place; its docstring names the condition.
    """

    id: str
    severity: Severity
    field: str
    """The setting the user would change."""
    consequence: str
    """What would happen, in one sentence."""
    fix: str
    source: str
    """Evidence: an issue, a file of a library, a document."""
    versions: str
    """What the rule was checked with."""
    check: Check[T]
    local: bool = False
    """Whether it looks at this machine, and not at recorded values alone."""
    auto_fix: Mend | None = None
    """Returns the mended plan and one note; only where the fix cannot surprise anybody."""

    @property
    def when(self) -> str:
        """The condition, in words."""
        return (self.check.__doc__ or "").strip().rstrip(".")

    def apply(self, subject: T) -> list[Problem]:
        """Return one problem per place where the rule applies."""
        return [self.problem(found) for found in self.check(subject)]

    def problem(self, found: Found) -> Problem:
        """Return the problem that a finding is."""
        return Problem(
            id=self.id,
            severity=self.severity,
            field=found.field or self.field,
            message=f"{found.what}: {self.consequence}",
            fix=found.fix or self.fix,
            source=self.source,
        )


class Maker(Protocol):
    """Turns a check of any subject into a rule."""

    def __call__(self, check: Check[T]) -> Rule[T]:
        """Return the rule."""
        ...


def rule(
    id: str,  # noqa: A002 (the column's name)
    severity: Severity,
    field: str,
    consequence: str,
    *,
    fix: str,
    source: str,
    versions: str = ANY,
    local: bool = False,
    auto_fix: Mend | None = None,
) -> Maker:
    """Turn a check into a `Rule`; the arguments are its attributes."""

    def make(check: Check[T]) -> Rule[T]:
        return Rule(id, severity, field, consequence, fix, source, versions, check, local, auto_fix)

    return make


def rules_in(names: Mapping[str, Any]) -> tuple[Rule[Any], ...]:
    """Return the rules among a module's names, by id."""
    found = [value for value in names.values() if isinstance(value, Rule)]
    return tuple(sorted(found, key=lambda item: item.id))


def by_severity(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems, errors first, else in their order."""
    return sorted(problems, key=lambda p: ("error", "warning", "note").index(p.severity))
