"""Prefix rendering finds in plain templates what their training twins in TRL mark as generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from soup_flows.data.chat import answer_spans, chat_profile, render

trl = pytest.importorskip("trl")
FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = ["qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl", "llama3", "gemma3", "cohere", "lfm2"]
CHATS = [
    [("user", "Q1?"), ("assistant", "A one")],
    [("user", "Q1?"), ("assistant", "A one"), ("user", "Q2"), ("assistant", "A two\n\nmore"), ("user", "Q3")],
    [("system", "be"), ("user", "Q1?"), ("assistant", "A one"), ("user", "Q2"), ("assistant", "A two")],
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pairs", CHATS, ids=["single", "multi", "system"])
def test_same_answers_as_the_training_template(
    tokenizer: Any, name: str, pairs: list[tuple[str, str]]
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    messages = [{"role": role, "content": content} for role, content in pairs]
    text = render(tokenizer, messages)
    found = [
        text[start:end] for start, end in answer_spans(tokenizer, messages, text, chat_profile(tokenizer))
    ]
    (marked_text,), (marked,) = render_jinja_template(
        conversations=[messages],
        chat_template=(FOLDER / f"{name}_training.jinja").read_text(),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    # Their marks may take in the line ends around an answer; ours begin after the generation prompt.
    assert found == [marked_text[start:end].strip() for start, end in marked]
