"""Formats are recognised, normalised, never coerced, never mixed."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soup_flows.data.formats import FORMATS, detect, iter_examples, load_examples
from soup_flows.data.normalise import CONVERTERS
from soup_flows.data.values import Dropped
from soup_flows.errors import Refused

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def turns(*pairs: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("row", "name", "messages"),
    [
        ({"messages": [U, A]}, "messages", [U, A]),
        ({"conversation": [U, A]}, "conversation", [U, A]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "sharegpt",
            [U, A],
        ),
        (
            {"instruction": "Add", "input": "1 2", "output": "3", "system": "Be brief"},
            "alpaca",
            turns(("system", "Be brief"), ("user", "Add\n\n1 2"), ("assistant", "3")),
        ),
        (
            {"instruction": "Why?", "context": "It is so.", "response": "So.", "category": "qa"},
            "alpaca",
            turns(("user", "Why?\n\nIt is so."), ("assistant", "So.")),
        ),
        ({"question": "q", "answer": "a", "id": 7}, "question-answer", [U, A]),
        ({"prompt": "q", "response": "a"}, "prompt-response", [U, A]),
        ({"prompt": [U], "completion": [A]}, "prompt-completion", [U | {"weight": 0}, A]),
        (
            {"messages": [U, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]},
            "messages",
            [U, A],
        ),
        ({"prompt": "q", "prompt_id": "x", "messages": [U, A]}, "messages", [U, A]),
        ({"messages": json.dumps([U, A])}, "messages", [U, A]),
    ],
)
def test_chats(write, row: dict, name: str, messages: list[dict]) -> None:
    data = load_examples(write([row]))
    assert (data.format, data.examples[0].kind, data.examples[0].format) == (name, "chat", name)
    assert [{k: m[k] for k in m} for m in data.examples[0].messages] == messages


@pytest.mark.parametrize(
    ("row", "name", "kind", "attributes"),
    [
        (
            {"prompt": "q ", "completion": "a"},
            "prompt-completion",
            "completion",
            {"prompt": "q ", "completion": "a"},
        ),
        ({"text": " a "}, "text", "text", {"text": " a "}),
        ({"input_ids": [1, 2]}, "pre-tokenised", "tokens", {"input_ids": [1, 2], "labels": None}),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, "pre-tokenised", "tokens", {"labels": [-100, 2]}),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            "preference",
            "preference",
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        ),
        (
            {"chosen": [U, A], "rejected": [U, A | {"content": "b"}]},
            "preference",
            "preference",
            {"messages": [U], "chosen": [A], "rejected": [A | {"content": "b"}]},
        ),
        (
            {"prompt": [U], "chosen": [U, A], "rejected": [U, A | {"content": "b"}]},
            "preference",
            "preference",
            {"messages": [U], "chosen": [A], "rejected": [A | {"content": "b"}]},
        ),
        (
            {"prompt": [U], "completion": [U, A], "label": True, "system": "s"},
            "kto",
            "kto",
            {"messages": [{"role": "system", "content": "s"}, U], "completion": [A], "label": True},
        ),
        (
            {"prompt": "q", "chosen": [A], "rejected": [A | {"content": "b"}]},
            "preference",
            "preference",
            {"messages": [U], "chosen": [A]},
        ),
        (
            {"prompt": "q", "completion": "a", "label": False},
            "kto",
            "kto",
            {"prompt": "q", "completion": "a", "label": False},
        ),
        (
            {"prompt": [U], "completion": [A], "label": True},
            "kto",
            "kto",
            {"messages": [U], "completion": [A], "label": True},
        ),
    ],
)
def test_other_kinds(write, row: dict, name: str, kind: str, attributes: dict) -> None:
    example = load_examples(write([row])).examples[0]
    assert (example.format, example.kind) == (name, kind)
    assert {key: getattr(example, key) for key in attributes} == attributes


@pytest.mark.parametrize(
    ("row", "reason", "field"),
    [
        ({"messages": [U, A | {"weight": 0.5}]}, "weight is neither 0 nor 1", "messages[1].weight"),
        ({"messages": [U, A | {"weight": 0}]}, "no trained turn", "messages"),
        ({"messages": [U, {"content": "a"}]}, "message without role", "messages[1].role"),
        ({"messages": [U, "a"]}, "message is not an object", "messages[1]"),
        ({"messages": {"role": "user"}}, "not a list of messages", "messages"),
        ({"messages": "hello"}, "not a list of messages", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, A]},
            "content part is not text",
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": ["a", "b"]}, A]},
            "list instead of text",
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": True}, A]}, "bool instead of text", "messages[0].content"),
        ({"messages": [{"role": ["user"], "content": "q"}, A]}, "unknown role", "messages[0].role"),
        ({"messages": [{"role": "User", "content": "q"}, A]}, "unknown role", "messages[0].role"),
        ({"instruction": "", "input": " ", "output": "a"}, "empty text", "instruction"),
        ({"instruction": "q", "input": 7, "output": "a"}, "int instead of text", "input"),
        ({"prompt": "q"}, "empty answer", "completion"),
        ({"prompt": "q", "completion": None}, "empty answer", "completion"),
        ({"text": "  "}, "empty text", "text"),
        ({"question": "q", "answer": "\u200b\ufeff\x00\u00a0"}, "empty answer", "answer"),
        ({"messages": [A | {"role": "user", "content": None}, A]}, "empty text", "messages[0].content"),
        ({"input_ids": []}, "no token ids", "input_ids"),
        ({"input_ids": [1, "2"]}, "not a token id", "input_ids[1]"),
        ({"input_ids": [1, True]}, "not a token id", "input_ids[1]"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels of another length", "labels"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "no trained token", "labels"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen equals rejected", "rejected"),
        ({"prompt": "q", "chosen": "a"}, "empty answer", "rejected"),
        (
            {"chosen": [U, A], "rejected": [U | {"content": "another"}, A | {"content": "b"}]},
            "answer is not the assistant's",
            "chosen",
        ),
        ({"prompt": [U], "chosen": [A], "rejected": [U, A, U]}, "answer is not the assistant's", "rejected"),
        (
            {"prompt": [U], "completion": [U | {"content": "another"}, A]},
            "answer is not the assistant's",
            "completion",
        ),
        (
            {"prompt": [U], "completion": [A, U], "label": True},
            "answer is not the assistant's",
            "completion",
        ),
        ({"prompt": "q", "completion": "a", "label": 1}, "label is not true or false", "label"),
        ({"foo": "q", "bar": "a"}, "no known columns", ""),
        ({}, "no known columns", ""),
    ],
)
def test_rows_that_cannot_teach(write, row: dict, reason: str, field: str) -> None:
    (item,) = iter_examples(write([row]))
    assert isinstance(item, Dropped)
    assert (item.reason, item.field, item.line) == (reason, field, 1)
    with pytest.raises(Refused, match="none of the 1 rows"):
        load_examples(write([row]))


def test_an_unknown_role_and_column_name_the_nearest(write) -> None:
    (item,) = iter_examples(write([{"messages": [{"role": "asistant", "content": "a"}]}]))
    assert isinstance(item, Dropped)
    assert "did you mean 'assistant'?" in item.wanted
    (item,) = iter_examples(write([{"mesages": []}]))
    assert isinstance(item, Dropped)
    assert "did you mean 'messages'?" in item.wanted


def test_a_tool_call_needs_no_content(write) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    row = {
        "messages": [U, call, {"role": "tool", "content": "7", "name": "f"}, A],
        "tools": [{"type": "function"}],
    }
    example = load_examples(write([row])).examples[0]
    assert example.messages[1]["tool_calls"] == call["tool_calls"]
    assert example.messages[2]["name"] == "f"
    assert example.tools == [{"type": "function"}]


def test_an_answer_that_is_not_trained_may_be_empty(write) -> None:
    row = {"messages": [U, {"role": "assistant", "content": "", "train": False}, U, A]}
    assert load_examples(write([row])).examples[0].messages[1]["weight"] == 0


def test_the_words_none_and_nan_are_text(write) -> None:
    rows = [{"instruction": "q", "output": word} for word in ("None", "nan", "null", "[1]")]
    answers = [example.messages[-1]["content"] for example in load_examples(write(rows)).examples]
    assert answers == ["None", "nan", "null", "[1]"]


def test_mixture_names_formats_and_rows(write) -> None:
    rows = [{"messages": [U, A]}, {"text": "x"}, {"messages": [U, A]}, {"text": "y"}]
    with pytest.raises(Refused, match=r"row 1 is messages, but row 2, 4 is text \(2 rows not messages\)"):
        load_examples(write(rows))


def test_a_null_column_is_a_drop_and_not_a_mixture(write) -> None:
    rows = [{"messages": [U, A], "text": "x"}, {"messages": None, "text": "y"}]
    data = load_examples(write(rows))
    assert (data.rows_kept, data.dropped[0].reason) == (1, "no messages")


def test_policy_refuse_names_every_row(write) -> None:
    with pytest.raises(Refused) as caught:
        load_examples(write([{"text": "a"}, {"text": ""}, {"text": 7}]), policy="refuse", field="data.x")
    assert len(caught.value.problems) == 2
    assert {problem.field for problem in caught.value.problems} == {"data.x"}
    assert [f":{line}: " in str(caught.value) for line in (1, 2, 3)] == [False, True, True]


def test_limit_and_counts(write) -> None:
    data = load_examples(write([{"text": "a"}, {"text": ""}, {"text": "b"}, {"text": "c"}]), limit=3)
    assert (data.rows_read, data.rows_kept, len(data.dropped)) == (3, 2, 1)


def test_every_format_has_a_converter() -> None:
    assert set(FORMATS) == set(CONVERTERS)
    for name, columns in FORMATS.items():
        assert detect(dict.fromkeys(columns, "x")) == name


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "type", "text"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
COLUMNS = sorted(
    {column for columns in FORMATS.values() for column in columns} | {"input", "labels", "tools"}
)


@given(rows=st.lists(st.dictionaries(st.sampled_from(COLUMNS), JSON, max_size=4), min_size=1, max_size=3))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_row_is_kept_dropped_or_refused(write, rows: list[dict]) -> None:
    try:
        data = load_examples(write(rows))
    except Refused:
        return
    assert data.rows_read == len(rows) == data.rows_kept + len(data.dropped)
    for example in data.examples:
        texts = [m["content"] for m in example.messages] + [example.prompt, example.text]
        assert all(isinstance(text, str) for text in texts)
