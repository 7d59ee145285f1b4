"""`SOUP_FLOWS_ROOTS` confines what a run may touch."""

from __future__ import annotations

from pathlib import Path

import pytest

from soup_flows.errors import Refused
from soup_flows.roots import ROOTS_VAR, problems_with_roots
from soup_flows.spec import TrainingSpec, parse_spec


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only one allowed, with a link that leads out of it."""
    root = tmp_path / "allowed"
    (root / "model").mkdir(parents=True)
    (root / "way-out").symlink_to(tmp_path)
    monkeypatch.setenv(ROOTS_VAR, str(root))
    monkeypatch.chdir(root)
    return root


def values(folder: Path) -> dict[str, object]:
    """Return a spec whose every path is allowed."""
    return {
        "model": str(folder / "model"),
        "dataset": str(folder / "rows.jsonl"),
        "output_dir": str(folder / "out"),
        "data": {"eval_dataset": "rows.jsonl", "cache_dir": str(folder / "cache")},
    }


def test_paths_inside_and_names_of_the_hub_pass(folder: Path) -> None:
    parse_spec(values(folder))
    parse_spec(values(folder) | {"model": "org/model", "dataset": f"file://{folder}/rows.jsonl"})
    parse_spec({"model": "demo://tiny-llama", "dataset": "demo://stdlib-qa"})
    for elsewhere in (
        "s3://bucket/rows.jsonl",
        "org/rows@main/data:test",
        "zip://a.jsonl::https://host/a.zip",
    ):
        assert parse_spec(values(folder) | {"dataset": elsewhere}).dataset == elsewhere


@pytest.mark.parametrize(
    "outside",
    [
        "/etc/passwd",
        "../other/rows.jsonl",
        "way-out/rows.jsonl",
        "file:///etc/passwd",
        "zip://rows.jsonl::file:///data/rows.zip",
        "simplecache::/etc/passwd",
        "git:///home/somebody/repository",
        "rows/../../other.jsonl",
        "~nobody-of-this-name/rows",
    ],
)
@pytest.mark.parametrize("field", ["model", "dataset", "data.eval_dataset"])
def test_a_path_outside_is_refused_by_its_field(folder: Path, field: str, outside: str) -> None:
    asked = values(folder)
    group = asked["data"] if "." in field else asked
    assert isinstance(group, dict)
    group[field.split(".")[-1]] = outside
    with pytest.raises(Refused) as refused:
        parse_spec(asked)
    assert [(p.id, p.field) for p in refused.value.problems] == [("SPEC004", field)]


def test_every_path_is_confined_and_all_are_named_at_once(folder: Path) -> None:
    asked = {
        "model": "/m",
        "dataset": "/d",
        "output_dir": "/o",
        "deepspeed_config": "/c.json",
        "nvme_path": "/n",
        "data": {"eval_dataset": "/e", "cache_dir": "/t"},
        "recovery": {"resume": "/r/runs/1"},
    }
    with pytest.raises(Refused) as refused:
        parse_spec(asked)
    found = {problem.field for problem in refused.value.problems}
    assert found == set(TrainingSpec.model_validate(asked).local_paths())
    assert len(found) == 8


def test_without_the_variable_nothing_is_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROOTS_VAR, raising=False)
    assert problems_with_roots({"model": "/anywhere"}) == []
