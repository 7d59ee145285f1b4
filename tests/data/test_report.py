"""The report: its figures, its page, its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from soup_flows.data.command import main
from soup_flows.data.lengths import Bin, count_packs, histogram, packed_padding_share, padded_share
from soup_flows.data.page import markdown
from soup_flows.data.report import report_on
from soup_flows.errors import Refused
from tests.charts import without_table
from tests.encoded_rows import prepare

ROWS = [
    {"instruction": "Name a colour", "output": "Blue"},
    {"instruction": "Name a colour", "output": "Blue"},
    {"instruction": "q", "output": None},
    {"instruction": "q " * 60, "output": "long | `x` <b>"},
]


def test_figures(write, tokenizer) -> None:
    rows, report = prepare(write(ROWS), tokenizer, max_length=40)
    assert (report.rows_read, report.rows_kept, report.format) == (4, 2, "alpaca")
    assert [(item["line"], item["reason"]) for item in report.dropped] == [
        (3, "empty answer"),
        (4, "no trained token left after truncation"),
    ]
    assert report.total_tokens == sum(len(row.input_ids) for row in rows)
    assert report.trained_tokens == sum(label != -100 for row in rows for label in row.labels)
    assert (report.duplicates, report.duplicate_lines, report.truncated_rows) == (1, (2,), 0)
    assert report.sample.count("⟦Blue<|im_end|>⟧") == 1
    assert report.padding_share == 0
    assert report.packed_padding_share == 1 - report.total_tokens / (
        40 * count_packs([len(r.input_ids) for r in rows], 40)
    )
    again = report_on(write(ROWS), tokenizer, max_length=40)
    assert again == report


def test_without_a_tokenizer_lengths_are_characters(write) -> None:
    report = report_on(write(ROWS))
    assert (report.rows_kept, report.length_unit, report.trained_tokens) == (3, "characters", None)
    assert report.longest == len("q " * 60) + len(ROWS[3]["output"])


def test_preference_rows_are_measured_but_not_prepared(write, tokenizer) -> None:
    source = write([{"prompt": "q", "chosen": "better", "rejected": "worse"}])
    assert "⟦better</s>⟧" in report_on(source, tokenizer).sample
    with pytest.raises(Refused, match="compared, not learned"):
        prepare(source, tokenizer, max_length=99)


def test_a_missing_end_token_is_said(write, tokenizer) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant: {% endif %}"
    report = report_on(write(ROWS), tokenizer)
    assert report.stop_trained_rows == 0
    assert any("will not learn to stop" in note for note in report.notes)


def test_page_cannot_be_broken_by_the_data(write, tokenizer) -> None:
    rows = [*ROWS, {"instruction": "q", "output": ["<img src=x>", "a|b", "[x](http://y)"]}]
    text = markdown(report_on(write(rows), tokenizer))
    assert "```mermaid\n%%{init" in text
    assert without_table(text) == []
    assert "&lt;img src=x&gt;" in text
    assert "<img" not in text
    assert r"\[x\](http://y)" in text
    head = next(line for line in text.splitlines() if line.startswith("| rows | reason"))
    drops = [line for line in text.splitlines() if "list instead of text" in line]
    assert [line.replace("\\|", "").count("|") for line in drops] == [head.count("|")]


def test_the_fence_is_longer_than_any_in_the_row(write, tokenizer) -> None:
    text = markdown(report_on(write([{"text": "````\ninside\n````"}]), tokenizer))
    assert text.rstrip().endswith("\n`````")


def test_histogram_and_padding() -> None:
    assert histogram([1, 16, 17, 100]) == (
        Bin(up_to=16, rows=2),
        Bin(up_to=32, rows=1),
        Bin(up_to=64, rows=0),
        Bin(up_to=128, rows=1),
    )
    assert histogram([]) == ()
    assert padded_share([1, 3], 2) == 1 - 4 / 6
    assert packed_padding_share([6, 5, 4, 5], 10) == 0
    assert count_packs([7, 7, 3, 3], 10) == 2
    with pytest.raises(ValueError, match="does not fit"):
        count_packs([11], 10)


def test_command_prints_one_json_object_or_a_page(write, tokenizer, tmp_path, capsys) -> None:
    tokenizer.save_pretrained(tmp_path / "tok")
    source = str(write(ROWS))
    assert main([source, "--tokenizer", str(tmp_path / "tok"), "--max-length", "40", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["rows_read"], out["rows_kept"], out["format"]) == (4, 2, "alpaca")
    assert {"line": 3, "reason": "empty answer", "field": "output", "found": "null"}.items() <= out[
        "dropped"
    ][0].items()
    assert out["trained_tokens"] > 0
    assert main([source]) == 0
    assert capsys.readouterr().out.startswith("# Data: 3 of 4 rows are trained")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.jsonl"], "there is no missing.jsonl"),
        (["{source}", "--policy", "refuse"], "empty answer"),
        (["{source}", "--max-length", "4"], "--tokenizer"),
        (["{source}", "--tokenizer", "nowhere"], "nowhere is not a folder"),
        (["{source}", "--tokenizer", "{folder}"], "no usable tokenizer"),
    ],
)
def test_command_refuses_with_2(write, tmp_path, capsys, arguments: list[str], words: str) -> None:
    source = str(write(ROWS))
    given = [part.format(source=source, folder=tmp_path) for part in arguments]
    assert main(given) == 2
    assert words in capsys.readouterr().err
    assert main([*given, "--json"]) == 2
    assert words in json.loads(capsys.readouterr().out)["problems"][0]["message"] + words


def test_module_runs(write) -> None:
    argv = [sys.executable, "-m", "soup_flows.data", str(write(ROWS)), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["rows_kept"] == 3
