"""Data files of every kind: each row is kept, or dropped with its place and reason; the file is read, or refused."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from soup_flows.data import jsonlines
from soup_flows.data.formats import iter_examples
from soup_flows.data.jsonlines import parse_cell
from soup_flows.data.reading import read_rows
from soup_flows.data.report import report_on
from soup_flows.data.sources import fetched, hub_source, is_url, pointer, split_of
from soup_flows.data.values import Dropped, Example, Row
from tests.fuzz.spoil import (
    PIECES,
    SCALARS,
    VALUES,
    WEIRD,
    damaged,
    documents,
    fuzz,
    lines,
    little_memory,
    put,
    value_or_refusal,
)

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "s"}, *CHAT], "tools": '[{"name": "f"}]'},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho", "weight": 1}], "system": "s"},
    {"instruction": "a", "input": "b", "output": "c", "history": [["q", "a"]]},
    {"prompt": "a", "completion": "b"},
    {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "No"}]},
    {"prompt": "a", "completion": "b", "label": True},
    {"text": "a document"},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
    {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "1"}, CHAT[1],
    ]},
]  # fmt: skip


def all_read(file: Path) -> None:
    """Everything comes out as a row, an example or a fault that can be shown."""

    def read() -> list[Any]:
        rows = list(read_rows(file))
        for row in rows:
            assert isinstance(row, Row | Dropped)
            str(row).encode() if isinstance(row, Dropped) else json.dumps(row.value, default=str).encode()
        return rows

    if value_or_refusal(read) is None:
        return

    def examples() -> list[Any]:
        found = list(iter_examples(file))
        for item in found:
            assert isinstance(item, Example | Dropped)
            if isinstance(item, Dropped):
                json.dumps(item.as_dict()).encode()
        return found

    value_or_refusal(examples)
    report = value_or_refusal(lambda: report_on(file))
    if report is not None:
        assert report.model_dump_json()


@fuzz(200)
@given(content=lines(ROWS), name=st.sampled_from(("a.jsonl", "a.json", "a.ndjson")))
@example(content=json.dumps({"messages": "[" * 100_000}).encode(), name="a.jsonl")
@example(content=json.dumps({**ROWS[0], "tools": "[" * 100_000}).encode(), name="a.jsonl")
@example(content=json.dumps({**ROWS[0], "tools": '[{"name": "\\ud800"}]'}).encode(), name="a.jsonl")
@example(content=json.dumps({"input_ids": [10**30], "labels": [-(10**30)]}).encode(), name="a.jsonl")
def test_json(content: bytes, name: str, tmp_path: Path) -> None:
    all_read(put(tmp_path / name, content))


@fuzz(150)
@given(
    content=st.lists(st.sampled_from(ROWS), max_size=4).flatmap(documents),
    chunk=st.integers(1, 40),
)
def test_arrays_read_in_pieces(content: bytes, chunk: int, tmp_path: Path) -> None:
    """The size of a piece changes nothing."""
    file = put(tmp_path / "a.json", content)
    with pytest.MonkeyPatch.context() as patch:
        whole = value_or_refusal(lambda: list(read_rows(file)))
        patch.setattr(jsonlines, "_CHUNK_BYTES", chunk)
        parts = value_or_refusal(lambda: list(read_rows(file)))
    values = [row.value for row in whole or () if isinstance(row, Row)]
    assert repr(values) == repr([row.value for row in parts or () if isinstance(row, Row)])


@fuzz(150)
@given(
    content=damaged(b'instruction,output\na,b\n"x, y","z\nz"\n')
    | damaged(b"sep=;\ntext;b\n1;2\n")
    | st.binary(max_size=80),
    name=st.sampled_from(("a.csv", "a.tsv", "a.txt")),
)
@example(content=b"messages\n" + b'"' + b"[" * 5000 + b'"\n', name="a.csv")
@example(content=b"sep=\x00\na\n", name="a.csv")
@example(content=b'sep="\n"a\n', name="a.csv")
@example(content=b"sep=\r\na\n", name="a.csv")
@example(content=b"a\r\x00b\n", name="a.csv")
def test_tables_and_text(content: bytes, name: str, tmp_path: Path) -> None:
    all_read(put(tmp_path / name, content))


@fuzz(100)
@given(content=lines(ROWS), cut=st.integers(0, 200), piece=st.sampled_from(PIECES))
def test_gzip(content: bytes, cut: int, piece: bytes, tmp_path: Path) -> None:
    packed = gzip.compress(content)
    all_read(put(tmp_path / "a.jsonl.gz", packed[: len(packed) - cut] + piece[:100]))


def packed_table(kind: str, rows: list[dict[str, Any]]) -> bytes:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table, sink = pa.Table.from_pylist(rows), io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, sink)
    else:
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns(kind: str, tmp_path: Path) -> None:
    goods = [packed_table(kind, [{"text": "a"}] * 50), packed_table(kind, [{"messages": CHAT}] * 3)]

    @fuzz(150)
    @given(
        content=st.sampled_from(goods).flatmap(damaged),
        flips=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=4),
    )
    def check(content: bytes, flips: list[tuple[int, int]]) -> None:
        changed = bytearray(content)
        for place, value in flips:
            if changed:
                changed[place % len(changed)] = value
        all_read(put(tmp_path / f"a.{kind}", bytes(changed)))

    check()


@fuzz(80)
@given(
    values=st.lists(
        st.binary(max_size=5) | st.none() | st.dates() | st.floats() | st.integers(-9, 9),
        min_size=1,
        max_size=1,
    )
)
def test_columns_of_other_types(values: list[Any], tmp_path: Path) -> None:
    for kind in ("parquet", "arrow"):
        for row in ({"text": values[0]}, {"messages": values[0]}, {"prompt": values[0], "completion": "x"}):
            all_read(put(tmp_path / f"a.{kind}", packed_table(kind, [row])))


@fuzz(200)
@given(text=st.sampled_from(WEIRD) | st.text(max_size=20) | VALUES.map(json.dumps))
def test_cells(text: str) -> None:
    value_or_refusal(lambda: json.dumps(parse_cell(text), ensure_ascii=False).encode(), ValueError)


@fuzz(200)
@given(
    source=st.sampled_from(WEIRD)
    | st.from_regex(r"[a-z./@:~-]{1,12}/[a-z@:./]{0,12}", fullmatch=True)
    | st.text(max_size=20)
)
def test_names_of_sources(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOUP_FLOWS_CACHE", str(tmp_path))
    name: Callable[[], Any]
    for name in (lambda: hub_source(source), lambda: is_url(source), lambda: split_of(source)):
        value_or_refusal(name)
    value_or_refusal(lambda: list(read_rows(source)))


@fuzz(100)
@given(
    content=documents({"source": "a/b", "files": ["/x"], "state": "1"})
    | SCALARS.map(json.dumps).map(str.encode)
)
def test_notes_of_what_was_fetched(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOUP_FLOWS_CACHE", str(tmp_path))
    put(pointer("a/b"), content)
    with little_memory():
        fetched("a/b")
