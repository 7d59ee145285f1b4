"""Validation: what would fail, do nothing or train wrong is found before anything is started.

No torch is imported; the rules are data and small functions. `docs/rules.md` is made from them:
`python -m soup_flows.validation > docs/rules.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soup_flows.data.formats import iter_examples
from soup_flows.data.reading import list_files
from soup_flows.data.values import Example
from soup_flows.deepspeed import load_deepspeed_config
from soup_flows.errors import Problem, Refused
from soup_flows.hardware import Hardware
from soup_flows.hardware.doctor import doctor
from soup_flows.lent import run_environment
from soup_flows.sharding import ShardingPlan, memory_problems
from soup_flows.spec import TrainingSpec
from soup_flows.validation import (
    batch,
    checkpointing,
    data,
    deepspeed,
    dtype,
    environment,
    fsdp,
    hardware,
    model,
    nvme,
    peft,
    ray,
    security,
    slurm,
    trackers,
    variables,
)
from soup_flows.validation.deep import RULES as DEEP_RULES
from soup_flows.validation.deep import check_deep
from soup_flows.validation.deepspeed_json import RULES as DEEPSPEED_RULES
from soup_flows.validation.deepspeed_json import check_deepspeed_config
from soup_flows.validation.facts import look_at_data, look_at_model
from soup_flows.validation.fsdp_config import RULES as FSDP_RULES
from soup_flows.validation.fsdp_config import check_fsdp_config
from soup_flows.validation.resuming import resume_problems
from soup_flows.validation.silence import settle
from soup_flows.validation.table import Context, Rule, by_severity

__all__ = [
    "RULES",
    "RUN_RULES",
    "apply_fixes",
    "check_deep",
    "check_deepspeed_config",
    "check_fsdp_config",
    "check_spec",
    "count_rows",
    "make_context",
    "validate",
    "with_others",
]

RUN_RULES: tuple[Rule[Context], ...] = tuple(
    rule
    for domain in (
        *(batch, dtype, deepspeed, nvme, fsdp, peft, checkpointing, model, data),
        *(environment, trackers, variables, hardware, security, slurm, ray),
    )
    for rule in domain.RULES
)
"""Rules about a run: spec, plan, machine, model, data, environment."""

RULES: tuple[Rule[Any], ...] = (*RUN_RULES, *DEEPSPEED_RULES, *FSDP_RULES, *DEEP_RULES)
"""Every rule, in the order in which problems are reported within a severity."""

COUNT_UP_TO_BYTES = 64 * 2**20
"""Larger data sets are not counted in the flow process."""
STAGE_FIELDS = ("deepspeed_config.zero_optimization", "deepspeed_config.zero_optimization.stage")
"""Where the rules about a DeepSpeed JSON say that there is no usable stage."""
BUILD_CHECKS = ("HW016", "HW017")
"""Checks of the doctor for which there are exact rules here."""


def validate(
    spec: TrainingSpec,
    hardware: Hardware,
    plan: ShardingPlan,
    *,
    environ: Mapping[str, str] | None = None,
    local: bool = True,
    deep: bool = False,
) -> list[Problem]:
    """Return every problem of a planned run, errors first; silenced ones are notes.

    Args:
        spec: what was asked.
        hardware: the machine that would run it.
        plan: the plan made from the two.
        environ: the environment that the ranks inherit; this process's when None.
        local: False for a machine that is not this one (a recording): its packages, folders and variables
            are then not looked at.
        deep: also build the model class without weights, load the tokenizer and encode the first rows, in a
            child process that takes some seconds. Nothing is looked at where there already is an error.
    """
    context, problems = make_context(spec, hardware, plan, environ=environ, local=local)
    for rule in RUN_RULES:
        if local or not rule.local:
            problems += rule.apply(context)
    problems += memory_problems(spec, plan)
    problems += resume_problems(spec, plan) if local else []
    if plan.engine == "deepspeed" and spec.deepspeed_config is not None:
        problems += check_deepspeed_config(plan.config, context)
    if plan.engine == "fsdp":
        problems += check_fsdp_config(plan.config)
    if plan.device == "cuda":
        used = hardware.model_copy(update={"gpus": hardware.gpus[: plan.ranks_per_node], "unused": ()})
        found = [p for p in doctor(used) if p.id not in BUILD_CHECKS and p.severity != "note"]
        problems += found
    failed = any(problem.severity == "error" for problem in problems)
    if deep and local and not failed and context.model.folder is not None:
        problems += check_deep(spec, plan.engine)
    return settle(problems, spec.validation, {rule.id for rule in RULES})


def check_spec(spec: TrainingSpec) -> list[Problem]:
    """Return what is wrong with model, data and DeepSpeed JSON whatever the machine, errors first.

    For specs that cannot be planned, so that their other problems are reported at the same time.
    """
    _, problems = look_at_model(spec.model)
    problems += look_at_data(spec)[1]
    if spec.deepspeed_config is not None:
        try:
            problems += check_deepspeed_config(load_deepspeed_config(spec.deepspeed_config))
        except Refused as refused:
            problems += refused.problems
    return by_severity(problems)


def with_others(refused: Refused, spec: TrainingSpec) -> Refused:
    """Add what can be found wrong without a plan.

    What is wrong in the DeepSpeed JSON stands first where the JSON is what was refused: a misspelt key is
    the reason that nothing would be sharded, and then the rule about the stage says it better.
    """
    known = {(p.id, p.field) for p in refused.problems}
    others = [p for p in check_spec(spec) if (p.id, p.field) not in known]
    bad_stage = any(p.severity == "error" and p.field in STAGE_FIELDS for p in others)
    found = [p for p in refused.problems if p.id != "PLAN007" or not bad_stage]
    by_json = any(p.field.startswith("deepspeed_config") for p in refused.problems)
    return Refused([*others, *found] if by_json else [*found, *others])


def make_context(
    spec: TrainingSpec,
    hardware: Hardware,
    plan: ShardingPlan,
    *,
    environ: Mapping[str, str] | None = None,
    local: bool = True,
) -> tuple[Context, list[Problem]]:
    """Read what the rules look at; the problems are those of reading model and data."""
    facts, problems = look_at_model(spec.model)
    rows, unread = look_at_data(spec)
    inherited = run_environment() if environ is None else environ
    return Context(spec, hardware, plan, facts, rows, inherited, local), problems + unread


def apply_fixes(
    spec: TrainingSpec, hardware: Hardware, plan: ShardingPlan, *, environ: Mapping[str, str] | None = None
) -> tuple[ShardingPlan, list[str]]:
    """Mend what can be mended without surprising anybody: values of the preset that do not fit the model.

    A user's own DeepSpeed JSON is never changed.

    Returns:
        The mended plan, and one note per change: rule id, old -> new and why.
    """
    notes: list[str] = []
    if spec.deepspeed_config is not None:
        return plan, notes
    context, _ = make_context(spec, hardware, plan, environ=environ)
    for rule in RUN_RULES:
        if rule.auto_fix is not None and rule.apply(context):
            mended, note = rule.auto_fix(context)
            notes.append(f"{rule.id}: {note}")
            context = Context(**{**vars(context), "plan": mended})
    return context.plan, notes


def count_rows(spec: TrainingSpec) -> int | None:
    """Return the rows that would be trained on, or None when that is not known before the launch.

    Rows without a trained token within `data.max_length` are found by the ranks only.
    """
    try:
        files = list_files(spec.dataset)
        if sum(Path(file).stat().st_size for file in files) > COUNT_UP_TO_BYTES:
            return None
        kept = sum(isinstance(item, Example) for item in iter_examples(spec.dataset))
    except (Refused, OSError):
        return None
    if spec.data.eval_split and not spec.data.eval_dataset:
        kept -= max(1, round(kept * spec.data.eval_split))
    return kept or None
