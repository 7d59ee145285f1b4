"""The page of the rules is current, and every id of the package can be explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import soup_flows
from soup_flows.validation import RULES
from soup_flows.validation.catalogue import CATALOGUE
from soup_flows.validation.explain import explain, is_known, rules_page

PACKAGE = Path(soup_flows.__file__).parent
PAGE = PACKAGE.parent / "docs/rules.md"
ID = re.compile(r"""["']([A-Z]{2,6}\d{3})["']""")
NO_RULES = {"UTF016", "SHA256"}


def ids_in_the_package() -> dict[str, Path]:
    return {
        found: file
        for file in sorted(PACKAGE.rglob("*.py"))
        for found in ID.findall(file.read_text(encoding="utf-8"))
        if found not in NO_RULES
    }


def test_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == rules_page(), (
        "run: python -m soup_flows.validation > docs/rules.md"
    )


def test_every_id_is_explained() -> None:
    found = ids_in_the_package()
    assert len(found) > 200
    lost = {rule: str(file) for rule, file in found.items() if not is_known(rule)}
    assert lost == {}, "add them to soup_flows/validation/catalogue.py, and make docs/rules.md again"


def test_catalogue_names_nothing_that_is_gone() -> None:
    assert set(CATALOGUE) - set(ids_in_the_package()) == set()
    assert set(CATALOGUE).isdisjoint(rule.id for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_has_its_place_on_the_page(rule: object) -> None:
    assert f"### {rule.id}\n" in PAGE.read_text(encoding="utf-8")  # type: ignore[attr-defined]


def test_explain() -> None:
    text = explain("ds063")
    assert text.startswith("DS063 (warning)")
    assert "overlap_comm" in text
    assert "Evidence: deepspeedai/DeepSpeed#4298, #5294" in text
    assert explain("HW001").startswith("HW001: `device=cuda` and no GPU")
    assert "did you mean" in explain("DS06")
    assert "docs/rules.md" in explain("nonsense 17")
