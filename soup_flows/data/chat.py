"""Where the answers stand in a rendered conversation, for templates with and without generation markers.

A tokenizer is any object with the interface of a fast Hugging Face tokenizer; nothing of it is imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from soup_flows.data.values import Message
from soup_flows.errors import refuse

Span = tuple[int, int]
"""First character and the one after the last."""

Token = tuple[int, int, int]
"""Token id, and the characters it stands for."""

_PLACEHOLDER = re.compile("\ufdd0(\\d+)\ufdd1")
_PROBE = "zxqanswerqxz"


class TemplateError(Exception):
    """The chat template cannot render a conversation, or not in a way that shows where the answers are."""


@dataclass(frozen=True)
class ChatProfile:
    """What is learned once from a tokenizer and its template.

    Attributes:
        template: the Jinja source this was learned from.
        has_markers: whether it has `{% generation %}` markers.
        header: the text that opens an answer (the generation prompt); may be empty.
        marks: matches every added token, special or not.
        ends: matches the tokens the template writes after an answer (gpt-oss has one for the last answer and
            one for those before); None when it writes none.
        stop_ids: ids that end an answer: those tokens and the tokenizer's EOS.
        control: special tokens, which are encoded as plain text inside a user's, system or tool message.
        answer_control: those of `control` that would break the structure even inside an answer.
    """

    template: str
    has_markers: bool
    header: str
    marks: re.Pattern[str] | None
    ends: re.Pattern[str] | None
    stop_ids: frozenset[int]
    control: re.Pattern[str] | None
    answer_control: re.Pattern[str] | None


_profiles: WeakKeyDictionary[Any, ChatProfile] = WeakKeyDictionary()


def chat_profile(tokenizer: Any) -> ChatProfile:
    """Return the profile of a tokenizer's chat template; it is learned once and kept while the object lives.

    Raises:
        Refused: if the tokenizer has no chat template, or one that leaves the text of messages out.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        fix = (
            "use the tokenizer of the instruction-tuned variant, set `chat_template` of the tokenizer, "
            "or give the data as prompt-completion or text"
        )
        raise refuse("DATA014", "model", "the tokenizer has no chat template, but the rows are chats", fix)
    known = _profiles.get(tokenizer)
    if known is None or known.template != template:
        known = _profiles[tokenizer] = _learn(tokenizer, template)
    return known


def _learn(tokenizer: Any, template: str) -> ChatProfile:
    added = {str(token): token for token in tokenizer.added_tokens_decoder.values() if str(token).strip()}
    question = [{"role": "user", "content": "q"}]
    answered = [*question, {"role": "assistant", "content": _PROBE}]
    header = ""
    end_tokens: set[str] = set()
    try:
        opened = render(tokenizer, question, generation_prompt=True)
        header = opened.removeprefix(render(tokenizer, question))
        header = "" if header == opened else header
        for messages in (answered, answered + question):
            _, found, tail = render(tokenizer, messages).rpartition(_PROBE)
            if not found:
                fix = "give a chat template for text, not one that wants lists of content parts"
                raise refuse("DATA017", "model", "the chat template leaves out the text of messages", fix)
            end_tokens.add(max((n for n in added if tail.lstrip().startswith(n)), key=len, default=""))
    except TemplateError:
        pass  # each row will say so itself
    if "" in end_tokens:  # nothing ends the last answer: what follows one before belongs to the next turn
        end_tokens = set()
    stop_ids = {tokenizer.convert_tokens_to_ids(name) for name in end_tokens} | {tokenizer.eos_token_id}
    control = [name for name, token in added.items() if token.special]
    own = {str(tokenizer.eos_token), str(tokenizer.bos_token), str(tokenizer.pad_token)}
    return ChatProfile(
        template=template,
        has_markers=re.search(r"\{%-?\s*generation\b", template) is not None,
        header=header,
        marks=_any_of(list(added)),
        ends=_any_of(list(end_tokens)),
        stop_ids=frozenset(stop_ids - {None}),
        control=_any_of(control),
        answer_control=_any_of([name for name in control if name in own or name in template]),
    )


def _any_of(names: list[str]) -> re.Pattern[str] | None:
    ordered = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def render(
    tokenizer: Any,
    messages: list[Message],
    tools: list[Any] | None = None,
    *,
    generation_prompt: bool = False,
) -> str:
    """Return the conversation as text.

    Raises:
        TemplateError: if the template refuses it, with the template's own words.
    """
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
        )
    except Exception as error:  # templates raise Jinja, type, key and index errors alike
        raise TemplateError(str(error).strip() or type(error).__name__) from None
    return str(text)


def shield(messages: list[Message], profile: ChatProfile) -> tuple[list[Message], list[str]]:
    """Put a placeholder where a control token stands in the text of a message.

    Returns:
        The messages, and the control tokens in the order of the placeholders' numbers.
    """
    found: list[str] = []

    def replace(match: re.Match[str]) -> str:
        found.append(match.group())
        return f"\ufdd0{len(found) - 1}\ufdd1"

    shielded = []
    for message in messages:
        pattern = profile.answer_control if message["role"] == "assistant" else profile.control
        if pattern is not None and pattern.search(message["content"]):
            message = message | {"content": pattern.sub(replace, message["content"])}
        shielded.append(message)
    return shielded, found


def tokenise(tokenizer: Any, text: str, hidden: list[str]) -> list[Token]:
    """Return the tokens of rendered text; placeholders become plain text, the control tokens `hidden`."""
    tokens: list[Token] = []
    start = 0
    for match in _PLACEHOLDER.finditer(text) if hidden else ():
        if int(match[1]) >= len(hidden):
            continue
        tokens += _pieces(tokenizer, text[start : match.start()], start)
        plain = tokenizer(hidden[int(match[1])], add_special_tokens=False, split_special_tokens=True)
        tokens += [(i, match.start(), match.end()) for i in plain["input_ids"]]
        start = match.end()
    return tokens + _pieces(tokenizer, text[start:], start)


def _pieces(tokenizer: Any, text: str, shift: int) -> list[Token]:
    if not text:
        return []
    encoded = tokenizer(
        text, add_special_tokens=False, split_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [(i, start + shift, end + shift) for i, (start, end) in pairs]


def answer_spans(
    tokenizer: Any, messages: list[Message], full: str, profile: ChatProfile, tools: list[Any] | None = None
) -> list[Span]:
    """Return where each answer stands in `full`, its end-of-turn token included.

    An answer begins where the conversation before it ends, rendered with the generation prompt, and ends
    where the conversation up to it ends; both must be beginnings of `full`. Where a template renders an
    earlier answer differently once another turn follows (Qwen3 strips the reasoning), the answer ends at its
    end-of-turn token.

    Args:
        tokenizer: with the chat template.
        messages: the conversation, control tokens shielded.
        full: the whole conversation, rendered.
        profile: of this tokenizer.
        tools: tool schemas.

    Raises:
        TemplateError: if the template has no such structure.
    """
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _answer_start(tokenizer, messages[:index], full, profile, tools)
        if spans and start < spans[-1][1]:
            raise TemplateError("the end of an answer cannot be told from the turn after it")
        until = render(tokenizer, messages[: index + 1], tools) if index + 1 < len(messages) else full
        if full.startswith(until) and len(until.rstrip()) > start:
            spans.append((start, len(until.rstrip())))
            continue
        end = profile.ends.search(full, start) if profile.ends else None
        if end is None:
            raise TemplateError("it renders an answer differently when another turn follows")
        spans.append((start, end.end()))
    return spans


def _answer_start(
    tokenizer: Any, before: list[Message], full: str, profile: ChatProfile, tools: list[Any] | None
) -> int:
    if not before:  # most templates cannot render an empty conversation
        at = full.find(profile.header) if profile.header else -1
        if at < 0:
            raise TemplateError("it has no header before an answer that opens the conversation")
        return at + len(profile.header)
    opened = render(tokenizer, before, tools, generation_prompt=True)
    if full.startswith(opened):
        return len(opened)
    # The generation prompt may open more than every answer has (`<think>`): take what they share, up to the
    # last line end or token.
    base = render(tokenizer, before, tools)
    pairs = enumerate(zip(opened, full, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(opened), len(full)))
    cuts = [full.rfind("\n", 0, shared) + 1]
    cuts += [match.end() for match in profile.marks.finditer(full, 0, shared)] if profile.marks else []
    if not full.startswith(base) or max(cuts) <= len(base):
        raise TemplateError("a conversation does not begin as its first turns alone do")
    return max(cuts)
