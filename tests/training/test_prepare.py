"""`prepare dataset`: once, by content, the same for any number of workers, and what the ranks then train on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from soup_flows import tasks
from soup_flows.data.prepare import PreparedData, cached_data, prepare_data
from soup_flows.errors import Refused
from soup_flows.paths import RunPaths
from soup_flows.spec import TrainingSpec, parse_spec
from soup_flows.training.prepare import prepare_here
from soup_flows.training.rows import StoredRows, prepared, token_rows
from soup_flows.validation.seen import Seen, look


@pytest.fixture
def spec(assets: dict[str, str], tmp_path: Path) -> Callable[..., TrainingSpec]:
    def build(dataset: Path | str | None = None, task: str = "sft", **data: Any) -> TrainingSpec:
        values = {"model": assets["model"], "dataset": str(dataset or assets["dataset"]), "device": "cpu"}
        values |= {
            "output_dir": str(tmp_path),
            "training": {"task": task},
            "data": {"max_length": 64, **data},
        }
        return parse_spec(values)

    return build


def lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines(keepends=True)


def stamps(data: PreparedData) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in Path(data.train.entry).iterdir()}


@pytest.mark.ranks
def test_a_second_call_tokenises_nothing(
    spec: Callable[..., TrainingSpec], assets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cached_data(spec()) is None
    first = prepare_data(spec(eval_dataset=assets["eval_dataset"]))  # in a process of its own
    written = stamps(first)
    assert cached_data(spec(eval_dataset=assets["eval_dataset"])) == first
    assert tasks.prepare_dataset.fn(spec(eval_dataset=assets["eval_dataset"])) == first
    assert stamps(first) == written
    assert first.train_rows == first.train.rows == len(lines(assets["dataset"]))
    here = prepare_here(spec(cache_dir=str(tmp_path / "other")))  # with torch; that process has none
    for name in ("lengths.bin", "ids.bin", "labels.bin"):
        assert (Path(here.train.entry) / name).read_bytes() == (Path(first.train.entry) / name).read_bytes()
    assert first.eval_rows == len(lines(assets["eval_dataset"]))
    monkeypatch.setattr("sys.executable", "/nothing")  # what the validation looks at was left there too
    seen = look(spec(eval_dataset=assets["eval_dataset"]))
    assert isinstance(seen, Seen)
    assert (seen.kept, seen.wrap_found) == (first.train_rows, ("LlamaDecoderLayer",))
    assert isinstance(look(spec(max_length=32)), str)


def test_what_changes_the_tokens_changes_the_entry(
    spec: Callable[..., TrainingSpec], assets: dict[str, str], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_text("".join(lines(assets["dataset"])))
    entries = {prepare_here(spec(copy)).train.entry}
    entries.add(prepare_here(spec(copy, max_length=32)).train.entry)
    entries.add(prepare_here(spec(copy, train_on="all")).train.entry)
    entries.add(prepare_here(spec(copy, task="pretrain")).train.entry)
    stat = copy.stat()
    copy.write_text(copy.read_text().replace("the", "eht", 1))
    os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same name, size and times, other content
    assert cached_data(spec(copy)) is None
    entries.add(prepare_here(spec(copy)).train.entry)
    assert len(entries) == 5


def test_workers_change_nothing(
    spec: Callable[..., TrainingSpec], assets: dict[str, str], tmp_path: Path
) -> None:
    from soup_flows.data.encoding import encode_source
    from soup_flows.data.prepare import settings_of
    from soup_flows.data.report import Tally
    from soup_flows.data.store import write_entry
    from soup_flows.training.prepare import load_tokenizer

    many = tmp_path / "many.jsonl"
    many.write_text("".join(lines(assets["dataset"]) * 9 + ['{"messages": []}\n']))
    tokenizer = load_tokenizer(spec())
    reports, files = [], []
    for workers in (1, 3):
        entry = tmp_path / f"entry-{workers}"
        chunks = encode_source(many, tokenizer, settings_of(spec(many)), workers=workers)
        report = write_entry(entry, chunks, Tally(many, tokenizer, 64), tokenizer)
        reports.append(report)
        files.append([(entry / name).read_bytes() for name in ("lengths.bin", "ids.bin", "labels.bin")])
    assert reports[0] == reports[1]
    assert files[0] == files[1]
    assert reports[0].rows_kept == 9 * len(lines(assets["dataset"]))
    assert [row["line"] for row in reports[0].dropped] == [reports[0].rows_kept + 1]


def test_stored_rows_are_the_encoded_rows(spec: Callable[..., TrainingSpec], assets: dict[str, str]) -> None:
    from soup_flows.training.prepare import load_tokenizer

    rows = StoredRows(Path(prepare_here(spec(max_length=1024)).train.entry))
    tokenizer = load_tokenizer(spec())
    for number in (0, 7, len(rows) - 1):
        messages = json.loads(lines(assets["dataset"])[number])["messages"]
        wanted = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert list(rows[number].input_ids) == wanted
        assert rows.lengths[number] == len(wanted)


def test_long_documents_are_divided_and_every_token_is_predicted_once(
    spec: Callable[..., TrainingSpec], tmp_path: Path
) -> None:
    file = tmp_path / "documents.jsonl"
    texts = [" ".join(f"word{i}" for i in range(count)) for count in (1, 40, 400)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = prepare_here(spec(file, task="pretrain", max_length=50))
    rows = StoredRows(Path(data.train.entry))
    assert data.train.report.rows_kept == 3 < data.train_rows == len(rows)
    assert max(rows.lengths) == 50
    documents: list[list[int]] = []
    for row in rows:
        ids = list(row.input_ids)
        assert list(row.labels) == ids
        if documents and documents[-1][-1] == ids[0]:
            documents[-1] += ids[1:]
        else:
            documents.append(ids)
    assert len(documents) == 3
    assert sum(len(ids) for ids in documents) == data.train.report.total_tokens


def test_a_share_is_held_out_and_never_trained(spec: Callable[..., TrainingSpec]) -> None:
    asked = spec(eval_split=0.1)
    data = prepare_here(asked)
    train, held_out = token_rows(asked, data)
    assert held_out is not None
    assert (len(train), len(held_out)) == (data.train_rows, data.eval_rows)
    assert data.train_rows + data.eval_rows == data.train.rows
    assert isinstance(train.rows, StoredRows)
    assert isinstance(held_out.rows, StoredRows)
    chosen = [*train.rows._chosen, *held_out.rows._chosen]
    assert sorted(chosen) == list(range(data.train.rows))


def test_faulty_rows_are_refused_when_asked(spec: Callable[..., TrainingSpec], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": null}\n')
    assert prepare_here(spec(file)).train_rows == 1
    for _ in range(2):  # from the cache too
        with pytest.raises(Refused, match=r"rows\.jsonl:2"):
            prepare_here(spec(file, bad_rows="refuse"))
    with pytest.raises(Refused, match=r"rows\.jsonl:2"):
        cached_data(spec(file, bad_rows="refuse"))


@pytest.mark.ranks
def test_a_refusal_of_the_process_is_a_refusal_here(
    spec: Callable[..., TrainingSpec], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": ""}\n')
    with pytest.raises(Refused, match="none of the 1 rows"):
        prepare_data(spec(file))
    assert not list((tmp_path / "cache" / "data").glob("*/"))


def test_without_the_task_the_first_rank_prepares(spec: Callable[..., TrainingSpec], tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run").create()
    first = prepared(spec(), paths, is_main=True)
    assert prepared(spec(), paths, is_main=False) == first == cached_data(spec())


def test_kto_takes_labels_and_pairs(spec: Callable[..., TrainingSpec], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "q", "completion": "good", "label": True},
        {"prompt": "q", "completion": "bad", "label": False},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    labelled = prepare_here(spec(file, task="kto"))
    file.write_text(json.dumps({"prompt": "q", "chosen": "good", "rejected": "bad"}) + "\n")
    paired = prepare_here(spec(file, task="kto"))
    assert labelled.train_rows == paired.train_rows == 2
    stored = [(Path(data.train.entry) / "pairs.jsonl").read_text() for data in (labelled, paired)]
    assert stored[0] == stored[1]
    for task, words in (("dpo", "`chosen` and `rejected`"), ("orpo", "`chosen` and `rejected`")):
        file.write_text(json.dumps(rows[0]) + "\n")
        with pytest.raises(Refused, match=words):
            prepare_here(spec(file, task=task))


def test_pairs_are_stored_for_dpo(spec: Callable[..., TrainingSpec], tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "chosen": "x", "rejected": "x"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepare_here(spec(file, task="dpo"))
    assert data.train_rows == 1
    assert [row["reason"] for row in data.train.report.dropped] == ["chosen equals rejected"]
    assert json.loads((Path(data.train.entry) / "pairs.jsonl").read_text()) == rows[0]
    with pytest.raises(Refused, match="preference"):
        prepare_here(spec(file))
