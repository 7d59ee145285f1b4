"""Data sets that are fetched: Hub names from the Hub's own cache, addresses through fsspec, splits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soup_flows.data.fetch import fetch
from soup_flows.data.formats import load_examples
from soup_flows.data.reading import list_files
from soup_flows.data.sources import HubSource, hub_source, is_remote, of_split, without_secrets
from soup_flows.errors import Refused

ROW = json.dumps({"prompt": "q", "completion": "a"}) + "\n"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOUP_FLOWS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in the Hub's cache, as `hf download` leaves it; the network is off."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    root = tmp_path / "hub" / "datasets--someone--rows"
    snapshot = root / "snapshots" / COMMIT
    (snapshot / "data").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    (snapshot / "README.md").write_text("# Rows")
    for name, rows in (("train-00000", 2), ("train-00001", 1), ("test-00000", 4)):
        (snapshot / "data" / f"{name}.jsonl").write_text(ROW * rows)
    return snapshot


def test_hub_names() -> None:
    assert hub_source("a/b") == HubSource("a/b")
    assert hub_source("a/b@v1.0/en/x.jsonl:dev") == HubSource("a/b", "v1.0", "en/x.jsonl", "dev")
    for local in ("rows.jsonl", "a/rows.jsonl", "/a/b", "./a/b", "../a/b", "~/a", "a/b.csv.gz"):
        assert not is_remote(local)
    Path("here").mkdir()
    assert not is_remote("here/b")  # a folder that is here is never looked for on the Hub


@pytest.mark.parametrize("name", ["someone/rows", f"someone/rows@{COMMIT}", "someone/rows/data:train"])
def test_a_hub_data_set_is_its_training_split(hub: Path, name: str) -> None:
    with pytest.raises(Refused, match="has not been fetched yet"):
        list_files(name)
    fetch(name)
    assert load_examples(name).rows_kept == 3
    assert all(str(file).startswith(str(hub)) for file in list_files(name))


def test_another_split_and_one_file(hub: Path) -> None:
    for name, rows in (("someone/rows:test", 4), ("someone/rows/data/train-00000.jsonl", 2)):
        fetch(name)
        assert load_examples(name).rows_kept == rows
    with pytest.raises(Refused, match="no file of the split validation"):
        fetch("someone/rows:validation")


@pytest.mark.usefixtures("hub")
def test_what_the_hub_does_not_have_is_refused() -> None:
    with pytest.raises(Refused, match="there is no someone/else here, and the Hub gave none"):
        fetch("someone/else")
    with pytest.raises(Refused, match="the Hub gave none"):
        fetch("someone/rows@v2")


def test_an_address_is_copied_once_and_again_when_it_changes(tmp_path: Path) -> None:
    far = tmp_path / "far" / "rows.jsonl"
    far.parent.mkdir()
    far.write_text(ROW)
    source = f"file://{far}"
    fetch(source)
    (copy,) = list_files(source)
    stamp = copy.stat().st_ino
    fetch(source)
    assert list_files(source)[0].stat().st_ino == stamp
    far.write_text(ROW * 2)
    fetch(source)
    assert load_examples(source).rows_kept == 2
    with pytest.raises(Refused, match="there is no file://"):
        fetch(f"file://{far}.gone")


def test_a_folder_of_any_file_system() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/rows/a.jsonl", ROW.encode())
    memory.pipe("/bucket/rows/deep/b.csv", b"prompt,completion\nq,a\n")
    memory.pipe("/bucket/rows/README.md", b"# Rows")
    fetch("memory://bucket/rows")
    assert [file.name for file in list_files("memory://bucket/rows")] == ["a.jsonl", "b.csv"]
    assert load_examples("memory://bucket/rows").rows_kept == 2
    memory.pipe("/empty/README.md", b"x")
    with pytest.raises(Refused, match="no data file in memory://empty"):
        fetch("memory://empty")


def test_a_file_system_that_is_not_installed_is_named() -> None:
    with pytest.raises(Refused, match="nosuch://bucket/rows cannot be fetched"):
        fetch("nosuch://key:secret@bucket/rows?signature=secret")
    assert without_secrets("s3://key:secret@b/r?sig=1 x") == "s3://b/r x"


def test_splits_of_a_folder_are_not_mixed(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text(ROW)
    with pytest.raises(Refused, match="several splits"):
        list_files(folder)
    (folder / "test.jsonl").rename(folder / "train-2.jsonl")
    assert len(list_files(folder)) == 2
    assert of_split(["a.csv", "b.csv"], "train") == ["a.csv", "b.csv"]
    assert of_split(["x/validation-0.csv", "x/train-0.csv"], "val") == ["x/validation-0.csv"]
