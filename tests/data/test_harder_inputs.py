"""More files as people really have them: what is read, what is dropped with which words, what is refused."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import pytest

from soup_flows.data.formats import iter_examples
from soup_flows.data.report import report_on
from soup_flows.data.values import EXAMPLES_A_REASON, Dropped
from soup_flows.errors import Refused
from tests.encoded_rows import prepare

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CHAT = {"messages": [Q, A]}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def roles(example: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in example.messages]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"system": "s", **CHAT}, [("system", "s"), ("user", "q"), ("assistant", "a")]),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [("system", "s"), ("user", "q"), ("assistant", "a")],
        ),
        ({"system": "s", "messages": [{"role": "system", "content": "s"}, Q, A]},
         [("system", "s"), ("user", "q"), ("assistant", "a")]),
        (
            {"instruction": "i", "input": None, "output": "o", "history": [["q0", "a0"]], "system": "s"},
            [("system", "s"), ("user", "q0"), ("assistant", "a0"), ("user", "i"), ("assistant", "o")],
        ),
        ({"prompt": "q", "completion": [A]}, [("user", "q"), ("assistant", "a")]),
        ({"prompt": [Q], "completion": "a"}, [("user", "q"), ("assistant", "a")]),
    ],
)  # fmt: skip
def test_nothing_of_a_conversation_is_left_out(write, row: dict, wanted: list) -> None:
    (example,) = iter_examples(write([row]))
    assert roles(example) == wanted


def test_tools_may_be_json_text(write) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    (example,) = iter_examples(write([{**CHAT, "tools": json.dumps(tools)}]))
    assert example.tools == tools


@pytest.mark.parametrize(
    ("row", "reason", "field"),
    [
        (
            {"system": "s", "messages": [{"role": "system", "content": "t"}, Q, A]},
            "two system prompts",
            "system",
        ),
        ({"system": "s", "prompt": "q", "completion": "a"}, "system prompt beside plain text", "system"),
        ({**CHAT, "tools": "f("}, "tools are not JSON", "tools"),
        ({**CHAT, "tools": ["f"]}, "tools are not a list of schemas", "tools"),
        ({"instruction": "i", "output": "o", "history": ["q0"]}, "history is not a list of pairs", "history"),
        ({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, "labels are not the tokens", "labels[0]"),
        ({"input_ids": [5, 6], "labels": [-100, 10**9]}, "labels are not the tokens", "labels[1]"),
        ({"input_ids": [5, 6], "labels": [-5, 6]}, "not a token id", "labels[0]"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "not an attention mask", "attention_mask"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 1]}, "not an attention mask", "attention_mask"),
        ({"prompt": "q", "completion": "a", "label": "yes"}, "label is not true or false", "label"),
    ],
)
def test_rows_that_would_teach_something_else(write, row: dict, reason: str, field: str) -> None:
    (item,) = iter_examples(write([row]))
    assert isinstance(item, Dropped)
    assert (item.reason, item.field) == (reason, field)


def test_padding_of_tokenised_rows_is_cut_off(write) -> None:
    row = {"input_ids": [0, 5, 6, 0], "labels": [-100, 5, 6, -100], "attention_mask": [0, 1, 1, 0]}
    (example,) = iter_examples(write([row]))
    assert (example.input_ids, example.labels) == ([5, 6], [5, 6])


@pytest.mark.parametrize(
    "text",
    [
        "prompt\tcompletion\nq\ta\n",
        "prompt|completion\nq|a\n",
        "sep=;\r\nprompt;completion\r\nq;a\r\n",
        "\ufeffprompt, completion\nq,a\n",
        'prompt,completion,label\nq,"a",None\n',
    ],
)
def test_tables_of_other_programs(write, text: str) -> None:
    (example,) = iter_examples(write(text, "data.csv"))
    assert (example.prompt, example.completion) == ("q", "a")


def test_missing_cells_are_not_answers(write) -> None:
    rows = list(iter_examples(write("prompt,completion\nq,NaN\nq,None\nq,\nq,none of them\n", "data.csv")))
    assert [getattr(row, "reason", "kept") for row in rows] == ["empty answer"] * 3 + ["kept"]


def test_labels_of_a_table_are_read(write) -> None:
    rows = iter_examples(write("prompt,completion,label\nq,a,True\nq,b,false\n", "data.csv"))
    assert [row.label for row in rows] == [True, False]


def test_files_laid_end_to_end_may_have_a_mark_in_the_middle(write) -> None:
    line = json.dumps(CHAT)
    assert len(list(iter_examples(write(f"\ufeff{line}\n\ufeff{line}\n")))) == 2


def test_other_files_under_the_name_of_rows_are_refused(write) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("rows.jsonl", json.dumps(CHAT))
    for data, what in (
        (packed.getvalue(), "zip archive"),
        (b"PAR1abc", "Parquet"),
        (b"\x80\x04\x95x", "pickle"),
    ):
        with pytest.raises(Refused, match=what):
            list(iter_examples(write(data)))


def test_rows_one_level_down_are_pointed_at(write) -> None:
    (item,) = iter_examples(write(json.dumps({"data": [CHAT]}), "data.json"))
    assert "the rows seem to be in 'data'" in item.wanted


def test_tool_calls_that_the_template_leaves_out_are_not_trained_as_nothing(write, tokenizer) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    source = write([CHAT, {"messages": [Q, call]}])
    rows, report = prepare(source, tokenizer, max_length=64)
    assert len(rows) == 1
    assert "leaves out tool calls" in report.dropped[0]["found"]
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    )
    rows, report = prepare(source, tokenizer, max_length=128)
    assert '"name": "f"' in tokenizer.decode([label for label in rows[1].labels if label != -100])


def test_a_doubled_bos_is_reduced_and_said(write, tokenizer) -> None:
    rows, report = prepare(write([{"text": "<s><s>hi"}, {"text": "hi"}]), tokenizer, max_length=64)
    assert rows[0].input_ids == rows[1].input_ids
    assert "a doubled BOS was reduced to one (1 row: line 1)" in report.notes


def test_the_report_of_faulty_data_stays_small(write, tokenizer) -> None:
    faulty = [{"messages": [Q]}] * 300 + [{"messages": None}] * 2
    report = report_on(write([CHAT, *faulty]), tokenizer, max_length=64)
    assert (report.rows_read, report.rows_kept, report.rows_dropped) == (303, 1, 302)
    assert report.reasons == {"no assistant turn": 300, "no messages": 2}
    assert len(report.dropped) == EXAMPLES_A_REASON + 2
    with pytest.raises(Refused, match="and 282 more rows with faults"):
        report_on(write([CHAT, *faulty]), tokenizer, max_length=64, policy="refuse")
