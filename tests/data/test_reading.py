"""Files as rows: kinds, encodings, faults with their place, sources that are refused, bounded memory."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soup_flows.data import jsonlines
from soup_flows.data.reading import read_rows
from soup_flows.data.values import Dropped, Row
from soup_flows.errors import Refused

ROWS = [{"text": "eins"}, {"text": "zwei äöü 漢字"}, {"text": "drei"}]


def values(source: Path) -> list[dict]:
    rows = list(read_rows(source))
    assert all(isinstance(row, Row) for row in rows), rows
    return [row.value for row in rows if isinstance(row, Row)]


def only_fault(source: Path) -> Dropped:
    (fault,) = [row for row in read_rows(source) if isinstance(row, Dropped)]
    return fault


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.JSONL"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_json_lines(write, name: str, end: str, mark: str) -> None:
    text = mark + end.join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    assert values(write(text, name)) == ROWS


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_json_array(write, name: str, indent: int | None) -> None:
    assert values(write("\n " + json.dumps(ROWS, indent=indent) + "\n\n", name)) == ROWS


def test_objects_over_several_lines(write) -> None:
    assert values(write("\n".join(json.dumps(row, indent=2) for row in ROWS), "a.json")) == ROWS


def test_array_longer_than_a_chunk_is_streamed(write, monkeypatch) -> None:
    monkeypatch.setattr(jsonlines, "_CHUNK_BYTES", 7)
    assert values(write(json.dumps(ROWS), "a.json")) == ROWS


@pytest.mark.parametrize(
    ("text", "number", "found"),
    [
        ('[{"a": 1}, {"a": 2}', 3, "ends early"),
        ('[{"a": 1}, ]', 2, "Expecting value"),
        ('[{"a": 1} {"a": 2}]', 2, "Expecting ','"),
        ('[{"a": 1}] x', 2, "'x'"),
        ('[{"a": 1}, 7]', 2, "7 (int)"),
    ],
)
def test_broken_array_names_the_row(write, text: str, number: int, found: str) -> None:
    fault = only_fault(write(text, "a.json"))
    assert fault.line == number
    assert found in fault.found


def test_gzip_by_content_whatever_the_name(write) -> None:
    packed = gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode())
    assert values(write(packed, "a.jsonl.gz")) == values(write(packed, "b.jsonl")) == ROWS
    for broken in (packed[:-9], packed[:12] + b"\xff" * 20 + packed[32:]):
        with pytest.raises(Refused, match="damaged gzip"):
            list(read_rows(write(broken, "cut.jsonl.gz")))


@pytest.mark.parametrize(("name", "sign"), [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t")])
def test_table(write, name: str, sign: str) -> None:
    text = f'instruction{sign}output\nAdd{sign}"two\nlines"\n\nno answer{sign}\n'
    rows = list(read_rows(write(text, name)))
    assert [row.value for row in rows] == [
        {"instruction": "Add", "output": "two\nlines"},
        {"instruction": "no answer", "output": None},
    ]
    assert [row.line for row in rows] == [2, 5]


def test_table_with_a_column_twice(write) -> None:
    fault = only_fault(write("text,text\na,b\n", "a.csv"))
    assert (fault.line, fault.reason) == (1, "duplicate column")


def test_table_in_a_windows_code_page_is_refused(write) -> None:
    with pytest.raises(Refused, match=r"byte 0xe9 is not UTF-8.*CP1252"):
        list(read_rows(write("text\ncafé\n".encode("cp1252"), "a.csv")))


def test_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "a"}\n7\n')
    fault = only_fault(Path(os.fsdecode(path)))
    assert str(fault).encode().endswith(b"an object with named columns")


def test_table_row_with_too_many_cells(write) -> None:
    fault = only_fault(write("text,label\na,b\na,b,c\n", "a.csv"))
    assert (fault.line, fault.found) == (3, "3 cells")


def test_text_is_one_document_a_line(write) -> None:
    assert values(write("eins\n\n  \nzwei äöü\r\n", "a.txt")) == [{"text": "eins"}, {"text": "zwei äöü"}]


def test_parquet_and_saved_arrow(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == ROWS
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    with (
        pa.OSFile(str(saved / "data-00000.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    assert values(saved) == ROWS
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(Refused, match=r"cut\.parquet is a damaged parquet file"):
        list(read_rows(tmp_path / "cut.parquet"))


def test_folder_in_the_order_of_paths(write, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, row in zip(("b.jsonl", "sub/c.jsonl", "a.jsonl"), ROWS, strict=True):
        write([row], name)
    write("about", "README.md")
    write("{}", "dataset_info.json")
    write([{"text": "hidden"}], ".a.jsonl")
    assert values(tmp_path) == [ROWS[2], ROWS[0], ROWS[1]]


def test_folder_of_splits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(Refused, match=r"several splits.*train"):
        list(read_rows(tmp_path))


def test_what_is_not_a_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(Refused, match="named pipe"):
        list(read_rows(tmp_path / "pipe.jsonl"))
    with pytest.raises(Refused, match="named pipe"):
        list(read_rows(tmp_path))
    with pytest.raises(Refused, match="a device"):
        list(read_rows("/dev/zero"))


def test_folder_that_leads_back_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    with pytest.raises(Refused, match="leads back"):
        list(read_rows(tmp_path))


def test_missing_file_names_the_nearest_one(write, tmp_path: Path) -> None:
    write(ROWS, "train.jsonl")
    with pytest.raises(Refused, match=r"did you mean 'train\.jsonl'") as caught:
        list(read_rows(tmp_path / "trian.jsonl", field="data.eval_dataset"))
    assert caught.value.problems[0].field == "data.eval_dataset"
    with pytest.raises(Refused, match=f"did you mean '{tmp_path.name}'"):
        list(read_rows(tmp_path.parent / (tmp_path.name + "x") / "train.jsonl"))
    with pytest.raises(Refused, match="null byte"):
        list(read_rows("a\0b.jsonl"))


def test_unknown_ending_and_empty_folder(write, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no data file"):
        list(read_rows(tmp_path))
    with pytest.raises(Refused, match=r"zstd -d a\.jsonl\.zst"):
        list(read_rows(write("x", "a.jsonl.zst")))


@pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_wide_encodings_are_named(write, code: str) -> None:
    with pytest.raises(Refused, match=r"UTF-(16|32)"):
        list(read_rows(write(json.dumps(ROWS[0]).encode(code))))


@pytest.mark.parametrize(
    ("line", "reason", "found"),
    [
        (b'{"text": "caf\xe9"}', "not UTF-8", "byte 0xe9 at byte 14"),
        (b'{"text": "a", "text": "b"}', "duplicate key", "twice"),
        (b'{"text": "a"} {"text": "b"}', "text after the JSON value", "column 15"),
        (b"[" * 100_000, "JSON nested too deeply", ""),
        (b'{"n": ' + b"1" * 5000 + b"}", "not valid JSON", "digits"),
        (b"null", "not a JSON object", "null"),
        (b'{"a": ["\\udc00"]}', "lone surrogate in text", "half"),
        (b'{"\\udc00": 1}', "lone surrogate in text", "half"),
    ],
)
def test_faulty_line_between_good_ones(write, line: bytes, reason: str, found: str) -> None:
    source = write(b'{"text": "before"}\n' + line + b'\n{"text": "after"}')
    before, fault, after = read_rows(source)
    assert isinstance(before, Row)
    assert isinstance(after, Row)
    assert isinstance(fault, Dropped)
    assert (fault.line, fault.reason, fault.file, after.line) == (2, reason, str(source), 3)
    assert found in fault.found
    str(fault).encode()


def test_endless_line_is_skipped(write, monkeypatch) -> None:
    monkeypatch.setattr(jsonlines, "MAX_ROW_BYTES", 100)
    source = write('{"text": "a"}\n{"text": "' + "x" * 1000 + '"}\n{"text": "b"}\n')
    _, fault, last = read_rows(source)
    assert isinstance(fault, Dropped)
    assert (fault.line, fault.reason, last.line) == (2, "line too long", 3)


@given(content=st.binary(max_size=200) | st.text(alphabet='[]{}",:\\a1 \n', max_size=60).map(str.encode))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_any_bytes_give_rows_faults_or_a_refusal(write, name: str, content: bytes) -> None:
    try:
        for row in read_rows(write(content, name)):
            json.dumps(row.value if isinstance(row, Row) else row.as_dict(), ensure_ascii=False).encode()
    except Refused:
        pass


def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    line = json.dumps(
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b c"}]}
    )
    program = (
        "import resource, sys; from soup_flows.data.formats import iter_examples\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "rows = sum(1 for _ in iter_examples(sys.argv[1]))\n"
        "print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)"
    )
    source = tmp_path / "many.jsonl"
    source.write_text((line + "\n") * 200_000)
    out = subprocess.run(
        [sys.executable, "-c", program, str(source)], capture_output=True, text=True, check=True
    ).stdout
    rows, grown_kib = map(int, out.split())
    assert rows == 200_000
    assert grown_kib < 8 * 1024, "kept rows would take over 100 MiB"


def test_import_is_light() -> None:
    program = (
        "import sys, soup_flows.demo, soup_flows.data.command\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'numpy', 'prefect'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
