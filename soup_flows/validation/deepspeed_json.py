"""The check of a user's DeepSpeed JSON, alone or against a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soup_flows.errors import Problem
from soup_flows.validation import (
    deepspeed_rules_batch,
    deepspeed_rules_keys,
    deepspeed_rules_optimizer,
    deepspeed_rules_other,
    deepspeed_rules_run,
    deepspeed_rules_zero,
)
from soup_flows.validation.deepspeed_config import DeepSpeedJson
from soup_flows.validation.table import Context, Rule, by_severity

RULES: tuple[Rule[DeepSpeedJson], ...] = (
    *deepspeed_rules_keys.RULES,
    *deepspeed_rules_batch.RULES,
    *deepspeed_rules_run.RULES,
    *deepspeed_rules_optimizer.RULES,
    *deepspeed_rules_zero.RULES,
    *deepspeed_rules_other.RULES,
)
"""Every rule about a DeepSpeed JSON."""


def check_deepspeed_config(config: Mapping[str, Any], context: Context | None = None) -> list[Problem]:
    """Return every problem of a DeepSpeed JSON, errors first.

    Args:
        config: the parsed file, as `load_deepspeed_config` returns it.
        context: the run that would use it; without one, only what is wrong for every run is found.
    """
    subject = DeepSpeedJson(config, context)
    return by_severity(problem for rule in RULES for problem in rule.apply(subject))
