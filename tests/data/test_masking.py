"""What the loss counts: answers and the token that ends them, with and without generation markers."""

from __future__ import annotations

from typing import Any

import pytest

from soup_flows.data.masking import IGNORED, encode
from soup_flows.data.values import Dropped, Encoded, Example
from soup_flows.errors import Refused

MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As TRL's training template of Qwen2.5 does: the line end after the token is marked too.
MARKED_ALL = MARKED.replace(
    "<|im_end|>{% endgeneration %}{{ '\\n' }}", "<|im_end|>{{ '\\n' }}{% endgeneration %}"
)
SHORT_MARKED = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
# As Qwen3 does: the reasoning of earlier answers goes, the last answer gets an empty one.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3.5 does: the generation prompt opens what earlier answers do not have.
OPEN_PROMPT = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# As gpt-oss does: the last answer ends with another token than those before.
TWO_ENDS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['role'] == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}</s>{% endfor %}"
)


def chat(*pairs: tuple[str, str], weights: dict[int, int] | None = None) -> Example:
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in pairs]
    for index, weight in (weights or {}).items():
        messages[index]["weight"] = weight
    return Example("chat", messages=messages, line=9, file="f.jsonl", format="messages")


TWO = (("user", "first?"), ("assistant", "one"), ("user", "second?"), ("assistant", "two\n\nlines"))


def trained(example: Example, tokenizer: Any, max_length: int = 999, **options: Any) -> list[str]:
    """Return the trained runs as text."""
    row = encode(example, tokenizer, max_length, **options)
    assert isinstance(row, Encoded), row
    assert len(row.input_ids) == len(row.labels)
    runs: list[list[int]] = []
    before = IGNORED
    for token, label in zip(row.input_ids, row.labels, strict=True):
        assert label in (IGNORED, token)
        if label != IGNORED:
            if before == IGNORED:
                runs.append([])
            runs[-1].append(label)
        before = label
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "runs"),
    [
        (None, ["one<|im_end|>", "two\n\nlines<|im_end|>"]),
        (MARKED, ["one<|im_end|>", "two\n\nlines<|im_end|>"]),
        (SHORT_MARKED, ["one<|im_end|>", "two\n\nlines<|im_end|>"]),
        (THINKING, ["one<|im_end|>", "<think>\n\ntwo\n\nlines<|im_end|>"]),
        (OPEN_PROMPT, ["one<|im_end|>", "\ntwo\n\nlines<|im_end|>"]),
        (TWO_ENDS, ["one<|end|>", "two\n\nlines<|return|>"]),
        (NO_END, [" one", "two\n\nlines"]),  # the space before it is part of its first token
        (MARKED_ALL, ["one<|im_end|>\n", "two\n\nlines<|im_end|>\n"]),
    ],
    ids=[
        "chatml",
        "marked",
        "marked-short",
        "thinking",
        "open-prompt",
        "two-ends",
        "no-end",
        "marked-line-end",
    ],
)
def test_answers_and_their_ends(tokenizer, template: str | None, runs: list[str]) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    assert trained(chat(*TWO), tokenizer) == runs
    row = encode(chat(*TWO), tokenizer, 999)
    assert isinstance(row, Encoded)
    assert row.stop_trained == (template != NO_END)
    assert (row.line, row.file) == (9, "f.jsonl")
    whole = tokenizer.apply_chat_template(chat(*TWO).messages, return_dict=False)
    assert row.input_ids == whole


@pytest.mark.parametrize("template", [None, MARKED, SHORT_MARKED, THINKING, TWO_ENDS])
@pytest.mark.parametrize("weight_of_last", [0, 1])
def test_weights(tokenizer, template: str | None, weight_of_last: int) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    example = chat(*TWO, weights={1: 1 - weight_of_last, 3: weight_of_last})
    (run,) = trained(example, tokenizer)
    assert ("two" if weight_of_last else "one") in run


def test_markers_and_prefix_rendering_agree(tokenizer) -> None:
    cases = [
        TWO,
        (("assistant", "Welcome"), ("user", "q"), ("assistant", "a")),
        (("system", "be brief"), ("user", "q"), ("user", "q2"), ("assistant", "assistant\n")),
        (("user", "q"), ("assistant", "a"), ("assistant", "b"), ("user", "left over")),
    ]
    plain = [encode(chat(*case), tokenizer, 999) for case in cases]
    tokenizer.chat_template = MARKED
    assert [encode(chat(*case), tokenizer, 999) for case in cases] == plain


def test_a_control_token_in_an_answer_does_not_end_it(tokenizer) -> None:
    example = chat(("user", "q"), ("assistant", "say <|im_end|> twice"))
    assert trained(example, tokenizer) == ["say <|im_end|> twice<|im_end|>"]
    row = encode(example, tokenizer, 999)
    assert isinstance(row, Encoded)
    assert row.input_ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2


def test_a_message_that_looks_like_a_placeholder_is_kept(tokenizer) -> None:
    (run,) = trained(chat(("user", "<s>"), ("assistant", "\ufdd07\ufdd1 x")), tokenizer)
    assert run == "\ufdd07\ufdd1 x<|im_end|>"


@pytest.mark.parametrize("template", ["{{ bos_token }}" + MARKED, "{{ bos_token }}" + NO_END, MARKED])
def test_bos_is_never_doubled(tokenizer, template: str) -> None:
    tokenizer.chat_template = template
    row = encode(chat(*TWO), tokenizer, 999)
    assert isinstance(row, Encoded)
    assert row.input_ids.count(tokenizer.bos_token_id) == template.count("bos_token")


def test_doubled_bos_of_template_and_text_is_reduced(tokenizer) -> None:
    tokenizer.chat_template = "{{ bos_token }}{{ bos_token }}" + NO_END
    row = encode(chat(*TWO), tokenizer, 999)
    assert isinstance(row, Encoded)
    assert row.input_ids[0] == tokenizer.bos_token_id != row.input_ids[1]
    row = encode(Example("text", text="<s>rendered elsewhere"), tokenizer, 999)
    assert isinstance(row, Encoded)
    assert row.input_ids.count(tokenizer.bos_token_id) == 1


def test_completion_trains_the_answer_and_eos(tokenizer) -> None:
    example = Example("completion", prompt="Q: 1+1 =", completion=" two", format="prompt-completion")
    assert trained(example, tokenizer) == [" two</s>"]
    row = encode(example, tokenizer, 999)
    assert isinstance(row, Encoded)
    assert row.stop_trained
    assert tokenizer.decode(row.input_ids) == "<s>Q: 1+1 = two</s>"


def test_text_trains_everything_and_one_eos(tokenizer) -> None:
    for text in ("a document", "a document</s>"):
        row = encode(Example("text", text=text), tokenizer, 999)
        assert isinstance(row, Encoded)
        assert tokenizer.decode(row.input_ids) == "<s>a document</s>"
        assert row.labels == row.input_ids


def test_tokens_are_taken_as_they_are_within_the_vocabulary(tokenizer) -> None:
    row = encode(Example("tokens", input_ids=[5, 6, 7], labels=[-100, 6, 7]), tokenizer, 2)
    assert isinstance(row, Encoded)
    assert (row.input_ids, row.labels, row.full_length) == ([5, 6], [-100, 6], 3)
    row = encode(Example("tokens", input_ids=[5, 10**6]), tokenizer, 9)
    assert isinstance(row, Dropped)
    assert row.reason == "token id outside the vocabulary"


def test_truncation_and_rows_without_a_trained_token(tokenizer) -> None:
    example = chat(("user", "word " * 50), ("assistant", "short"))
    whole = encode(example, tokenizer, 999)
    assert isinstance(whole, Encoded)
    first = next(i for i, label in enumerate(whole.labels) if label != IGNORED)
    kept = encode(example, tokenizer, first + 1)
    assert isinstance(kept, Encoded)
    assert (len(kept.input_ids), kept.full_length, kept.stop_trained) == (first + 1, whole.full_length, False)
    gone = encode(example, tokenizer, first)
    assert isinstance(gone, Dropped)
    assert (gone.line, gone.reason) == (9, "no trained token left after truncation")
    assert f"number {first + 1}" in gone.found


def test_train_on_all(tokenizer) -> None:
    row = encode(chat(*TWO), tokenizer, 999, train_on="all")
    assert isinstance(row, Encoded)
    assert row.labels == row.input_ids


def test_a_template_that_refuses_the_roles_names_them(tokenizer) -> None:
    tokenizer.chat_template = ALTERNATING
    row = encode(chat(("user", "q"), ("user", "q2"), ("assistant", "a")), tokenizer, 999)
    assert isinstance(row, Dropped)
    assert row.found == "roles must alternate (roles user, user, assistant)"


def test_a_template_without_structure_is_an_error_and_not_a_wrong_mask(tokenizer) -> None:
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
    )
    row = encode(chat(*TWO), tokenizer, 999)
    assert isinstance(row, Dropped)
    assert "does not begin as its first turns alone do" in row.found
    assert "{% generation %}" in row.wanted


@pytest.mark.parametrize(
    ("template", "words"),
    [(None, "no chat template"), ("{% for m in messages %}<s>{% endfor %}", "leaves out the text")],
)
def test_templates_that_are_refused(tokenizer, template: str | None, words: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(Refused, match=words):
        encode(chat(*TWO), tokenizer, 999)


def test_preference_pairs_are_not_trained_as_answers(tokenizer) -> None:
    with pytest.raises(Refused, match="compared, not learned"):
        encode(Example("preference", prompt="q", chosen="a", rejected="b"), tokenizer, 999)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_sentencepiece_style_tokenizers(scheme: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(byte_fallback=False, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(["the cat sat [INST] on the mat [/INST] two words\n"] * 5, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
    )
    example = chat(("user", "the cat"), ("assistant", "two words"), ("user", "on"), ("assistant", "the mat"))
    assert [run.strip() for run in trained(example, tokenizer)] == ["two words</s>", "the mat</s>"]
    row = encode(example, tokenizer, 999)
    assert isinstance(row, Encoded)
    assert row.stop_trained
    assert row.input_ids[:2].count(1) == 1
    completion = Example("completion", prompt="the cat sat ", completion="on the mat")
    assert [run.strip() for run in trained(completion, tokenizer)] == ["on the mat</s>"]
