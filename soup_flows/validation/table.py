"""What a rule is, and what it looks at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from soup_flows.errors import Problem, Severity
from soup_flows.hardware import Hardware
from soup_flows.sharding import ShardingPlan
from soup_flows.spec import TrainingSpec


@dataclass(frozen=True)
class Context:
    """Everything a rule may look at."""

    spec: TrainingSpec
    hardware: Hardware
    plan: ShardingPlan
    model_config: dict[str, Any] | None
    """The model's `config.json`; None for a Hub id."""


@dataclass(frozen=True)
class Rule:
    """One thing that is known to fail, to do nothing, or to train wrong.

    `check` returns what was found, in words that complete the sentence, or None when the rule does not apply.
    """

    id: str
    severity: Severity
    field: str
    """The setting the user would change."""
    consequence: str
    """What would happen, in one sentence."""
    fix: str
    source: str
    """Evidence: an issue, a line of a library's source, a measurement."""
    check: Callable[[Context], str | None]

    def apply(self, context: Context) -> Problem | None:
        """Return the problem, or None."""
        found = self.check(context)
        if found is None:
            return None
        return Problem(
            id=self.id,
            severity=self.severity,
            field=self.field,
            message=f"{found}: {self.consequence}" if found else self.consequence,
            fix=self.fix,
            source=self.source,
        )
