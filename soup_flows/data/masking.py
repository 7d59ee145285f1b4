"""Examples as token ids with labels: the loss counts answers and the token that ends them, nothing else."""

from __future__ import annotations

from typing import Any, Literal

from soup_flows.data.chat import (
    ChatProfile,
    Span,
    TemplateError,
    Token,
    answer_spans,
    chat_profile,
    render,
    shield,
    tokenise,
)
from soup_flows.data.values import Dropped, Encoded, Example, Message
from soup_flows.errors import refuse

IGNORED = -100
"""Label of a token that is not trained; the value PyTorch's cross entropy ignores by default."""

TrainOn = Literal["assistant", "all"]


def encode(
    example: Example, tokenizer: Any, max_length: int, train_on: TrainOn = "assistant"
) -> Encoded | Dropped:
    """Return a row as token ids and labels.

    - Chats go through the tokenizer's template. With `{% generation %}` markers the template says what an
      answer is; without them the answers are found by prefix rendering. The end-of-turn token after an answer
      is always trained. Messages of weight 0 are not. Control tokens in a message are encoded as plain text.
    - Prompt-completion rows and documents need no template; EOS is appended. Control tokens in them stay what
      they are, since such rows often are conversations rendered elsewhere.
    - A doubled BOS is reduced to one.

    Args:
        example: of any kind but preference and kto.
        tokenizer: a fast Hugging Face tokenizer, or an object like it.
        max_length: longer rows are cut at the end, in tokens.
        train_on: `assistant` trains answers (completions, documents), `all` every token.

    Returns:
        `Encoded`, or `Dropped` when the template refuses the row or no trained token is left.

    Raises:
        Refused: if a chat meets a tokenizer without chat template, a tokenizer is not fast, or the example
            holds preference pairs.
    """
    if not getattr(tokenizer, "is_fast", True):
        raise refuse("DATA015", "model", "the tokenizer is not a fast one", "save it with tokenizer.json")
    if example.kind in ("preference", "kto"):
        fix = "use a data set of conversations, or a preference method"
        raise refuse(
            "DATA016", "dataset", f"rows of the format {example.format} are compared, not learned", fix
        )
    stop_ids = frozenset({tokenizer.eos_token_id} - {None})
    try:
        if example.kind == "chat":
            profile = chat_profile(tokenizer)
            stop_ids = profile.stop_ids
            ids, labels = _chat(example, tokenizer, profile)
        elif example.kind == "tokens":
            ids, labels = list(example.input_ids), list(example.labels or example.input_ids)
        else:
            ids, labels = _plain(example, tokenizer)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in example.messages)
        wanted = "a conversation the template accepts, or a template with {% generation %} markers"
        return _drop(
            example, "the chat template cannot be used", f"{str(error)[:200]} (roles {roles})", wanted
        )
    if (largest := max(ids, default=0)) >= len(tokenizer):
        wanted = f"ids below {len(tokenizer)}, the size of the vocabulary"
        return _drop(example, "token id outside the vocabulary", str(largest), wanted)
    if train_on == "all":
        labels = list(ids)
    ids, labels, notes = _one_bos(ids, labels, tokenizer)
    return _finish(example, (ids, labels), max_length, stop_ids, notes)


def _finish(
    example: Example,
    pair: tuple[list[int], list[int]],
    max_length: int,
    stop_ids: frozenset[int],
    notes: tuple[str, ...],
) -> Encoded | Dropped:
    """Truncate, and drop the row when nothing of it is trained (the first label is never predicted)."""
    ids, labels = pair
    cut = labels[:max_length]
    trained = {label for label in cut[1:] if label != IGNORED}
    if not trained:
        if len(ids) > max_length and any(label != IGNORED for label in labels[1:]):
            first = next(i for i, label in enumerate(labels) if i and label != IGNORED)
            found = f"{len(ids)} tokens, the first trained one is number {first + 1}"
            wanted = f"a trained token among the first {max_length}"
            return _drop(example, "no trained token left after truncation", found, wanted)
        return _drop(example, "no trained token", f"{len(ids)} tokens", "a token the loss counts")
    return Encoded(
        ids[:max_length], cut, len(ids), not stop_ids.isdisjoint(trained), example.line, example.file, notes
    )


def _drop(example: Example, reason: str, found: str, wanted: str) -> Dropped:
    fields = {"chat": "messages", "completion": "completion", "text": "text", "tokens": "input_ids"}
    return Dropped(example.line, reason, fields.get(example.kind, ""), found, wanted, example.file)


def _one_bos(
    ids: list[int], labels: list[int], tokenizer: Any
) -> tuple[list[int], list[int], tuple[str, ...]]:
    """Leave one BOS where a row begins with several: one in the text, one from the template or the tokenizer."""
    bos, extra = tokenizer.bos_token_id, 0
    while bos is not None and ids[extra : extra + 2] == [bos, bos]:
        extra += 1
    return ids[extra:], labels[extra:], ("a doubled BOS was reduced to one",) if extra else ()


def _plain(example: Example, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Encode a document, or a prompt and its completion as one text; append EOS."""
    text, start = example.text, 0
    if example.kind == "completion":
        text, start = example.prompt + str(example.completion), len(example.prompt)
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids = list(encoded["input_ids"])
    if start:  # what the tokenizer adds by itself, such as BOS, stands for no character and is not trained
        labels = [
            i if end > start else IGNORED for i, (_, end) in zip(ids, encoded["offset_mapping"], strict=True)
        ]
    else:
        labels = list(ids)
    eos = tokenizer.eos_token_id
    if eos is not None and ids[-1:] != [eos]:
        ids.append(eos)
        labels.append(eos)
    elif eos is not None:
        labels[-1] = eos
    return ids, labels


def _chat(example: Example, tokenizer: Any, profile: ChatProfile) -> tuple[list[int], list[int]]:
    messages, hidden = shield(example.messages, profile)
    weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
    messages = [{k: v for k, v in message.items() if k != "weight"} for message in messages]
    if any(m.get("tool_calls") for m in messages) and "tool_calls" not in profile.template:
        raise TemplateError("it leaves out tool calls, and the answer would be empty")
    if profile.has_markers and not hidden:
        marked = _by_markers(example, messages, weights, tokenizer, profile)
        if marked is not None:
            return marked
    full = render(tokenizer, messages, example.tools)
    spans = answer_spans(tokenizer, messages, full, profile, example.tools)
    kept = [span for span, weight in zip(spans, weights, strict=True) if weight]
    tokens = tokenise(tokenizer, full, hidden)
    return [token[0] for token in tokens], _label(tokens, kept)


def _label(tokens: list[Token], spans: list[Span]) -> list[int]:
    """Label the tokens that overlap a span; both are in order."""
    labels, at = [], 0
    for token, start, end in tokens:
        while at < len(spans) and start >= spans[at][1]:
            at += 1
        labels.append(token if at < len(spans) and end > spans[at][0] else IGNORED)
    return labels


def _by_markers(
    example: Example, messages: list[Message], weights: list[int], tokenizer: Any, profile: ChatProfile
) -> tuple[list[int], list[int]] | None:
    """Use the template's own mask; None when its marked parts cannot be told apart by message.

    The token that ends a turn is added where the markers leave it out
    (https://github.com/huggingface/trl/pull/5988).
    """
    try:
        encoded = tokenizer.apply_chat_template(
            messages,
            tools=example.tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
    except Exception as error:  # templates raise Jinja, type, key and index errors alike
        raise TemplateError(str(error).strip() or type(error).__name__) from None
    ids = list(encoded["input_ids"])
    mask = [bool(bit) for bit in encoded["assistant_masks"]]
    starts = [i for i, bit in enumerate(mask) if bit and not (i and mask[i - 1])]
    if 0 in weights and len(starts) != len(weights):
        return None
    for index, start in enumerate(starts):
        end = start
        while end < len(mask) and mask[end]:
            end += 1
        if 0 in weights and not weights[index]:
            mask[start:end] = [False] * (end - start)
        elif end < len(ids) and ids[end] in profile.stop_ids:
            mask[end] = True
    return ids, [i if bit else IGNORED for i, bit in zip(ids, mask, strict=True)]
