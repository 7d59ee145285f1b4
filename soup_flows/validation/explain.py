"""The page of all rules, and the explanation of one."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from soup_flows.errors import nearest
from soup_flows.validation import RULES
from soup_flows.validation.catalogue import CATALOGUE
from soup_flows.validation.table import Rule

DOMAINS = {
    "BT": "Batch, steps and schedule",
    "DT": "Precision",
    "DS": "DeepSpeed",
    "FS": "FSDP",
    "PE": "Adapters and quantised models",
    "MD": "Model",
    "DA": "Data and tokenizer",
    "CP": "What a run writes",
    "EN": "Packages, folders and environment variables",
    "HW": "Machine",
    "SL": "Slurm",
    "RAY": "Ray",
    "SE": "Security",
    "DP": "Model class, tokenizer and rows (the deep look)",
}
PAGE = "docs/rules.md"


def explain(rule_id: str) -> str:
    """Return what a rule is about, as text for a terminal; for an unknown id, the nearest ones.

    Args:
        rule_id: such as `DS014`, in any case.
    """
    wanted = rule_id.strip().upper()
    for rule in RULES:
        if rule.id == wanted:
            return _text(rule)
    if wanted in CATALOGUE:
        what, fix = CATALOGUE[wanted]
        return f"{wanted}: {what}.\nFix: {fix}.\n"
    known = [*(rule.id for rule in RULES), *CATALOGUE]
    near = nearest(wanted, known)
    return f"There is no rule {rule_id!r}; {near or 'docs/rules.md lists them all'}\n"


def is_known(rule_id: str) -> bool:
    """Whether `explain` knows this id."""
    return rule_id.upper() in CATALOGUE or any(rule.id == rule_id.upper() for rule in RULES)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _parts(rule: Rule[Any]) -> list[tuple[str, str]]:
    """Return label and text of everything that is known about a rule."""
    parts = [
        ("What", _sentence(rule.when)),
        ("Why", _sentence(rule.consequence)),
        ("Fix", _sentence(rule.fix)),
        ("Setting", f"`{rule.field}`"),
        ("Evidence", rule.source),
        ("Holds for", rule.versions),
    ]
    if rule.auto_fix is not None:
        parts.append(("Mended by itself", "yes, in presets, with a note"))
    return parts


def _text(rule: Rule[Any]) -> str:
    lines = [f"{rule.id} ({rule.severity})"]
    for label, text in _parts(rule):
        lines.append(textwrap.fill(f"{label}: {text}", width=100, subsequent_indent="  "))
    return "\n".join(lines) + "\n"


def rules_page() -> str:
    """Return `docs/rules.md`."""
    lines = [
        "# Rules",
        "",
        "What is checked before a run is started. This page is made by `python -m soup_flows.validation`.",
        "An error refuses the run, a warning does with `validation.strict`, a note is only told. A rule is",
        'silenced with `validation.silence={"DS063": "the reason"}`; the reason is kept with the run.',
        "`soup-flows explain DS063` prints one rule.",
        "",
    ]
    for prefix, title in DOMAINS.items():
        rules = sorted((r for r in RULES if r.id.startswith(prefix)), key=lambda r: r.id)
        lines += [f"## {title}", "", *_section(rules)]
    lines += ["## What other parts refuse or report", "", "| Id | What | Fix |", "|---|---|---|"]
    lines += [f"| {rule} | {what} | {fix} |" for rule, (what, fix) in sorted(CATALOGUE.items())]
    return "\n".join(lines) + "\n"


def _section(rules: Sequence[Rule[Any]]) -> list[str]:
    lines = []
    for rule in rules:
        lines += [f"### {rule.id}", "", f"{rule.severity.capitalize()}. {_sentence(rule.when)}", ""]
        lines += [f"- {label}: {text}" for label, text in _parts(rule)[1:]]
        lines.append("")
    return lines
