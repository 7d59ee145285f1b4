"""Validation: what would fail, do nothing or train wrong is found before anything is started.

No torch is imported; the rules are data and small functions.
"""

from __future__ import annotations

from pathlib import Path

from soup_flows.data.formats import iter_examples, load_examples
from soup_flows.data.reading import list_files
from soup_flows.data.values import Example
from soup_flows.errors import Problem, Refused
from soup_flows.hardware import Hardware
from soup_flows.sharding import ShardingPlan, memory_problems, read_model_config
from soup_flows.spec import TrainingSpec
from soup_flows.validation import environment
from soup_flows.validation.table import Context, Rule

RULES: tuple[Rule, ...] = environment.RULES
"""Every rule, in the order in which problems are reported within a severity."""

LOOK_AT_ROWS = 1000
"""Rows of each data set that are read before a launch; the ranks read all of them."""
COUNT_UP_TO_BYTES = 64 * 2**20
"""Larger data sets are not counted in the flow process."""


def validate(spec: TrainingSpec, hardware: Hardware, plan: ShardingPlan) -> list[Problem]:
    """Return every problem of a planned run, errors first.

    Args:
        spec: what was asked.
        hardware: the machine that would run it.
        plan: the plan made from the two.
    """
    problems: list[Problem] = []
    model_config = None
    try:
        model_config = read_model_config(spec.model)
    except Refused as refused:
        problems += refused.problems
    problems += _data_problems(spec)
    problems += memory_problems(spec, plan)
    context = Context(spec, hardware, plan, model_config)
    problems += [found for rule in RULES if (found := rule.apply(context)) is not None]
    return sorted(problems, key=lambda p: ("error", "warning", "note").index(p.severity))


def _data_problems(spec: TrainingSpec) -> list[Problem]:
    """Read the first rows of each local data set."""
    problems: list[Problem] = []
    for field, source in (("dataset", spec.dataset), ("data.eval_dataset", spec.data.eval_dataset)):
        if source is None:
            continue
        try:
            load_examples(source, field=field, limit=LOOK_AT_ROWS)
        except Refused as refused:
            problems += refused.problems
    return problems


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
