"""One converter per format: a row in, an `Example` out, or `BadRow` with the exact place of the fault.

Nothing is coerced: a number or a list where text should be is a fault, never printed into the training text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from soup_flows.data.values import Example, Message, Row, shown
from soup_flows.errors import nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles a message may have."""

_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_KEPT_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content")
_CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
)


class BadRow(Exception):
    """A row that cannot teach.

    Attributes:
        reason: short, the same for all rows with this fault.
        field: where in the row.
        found: what stands there.
        wanted: what should stand there.
    """

    def __init__(self, reason: str, field: str, found: str, wanted: str) -> None:
        super().__init__(reason, field, found, wanted)
        self.reason, self.field, self.found, self.wanted = reason, field, found, wanted


def text_of(value: object, field: str, *, blank_ok: bool = False) -> str:
    """Return text, or the joined text parts of a list of parts; everything else is a `BadRow`."""
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        for index, part in enumerate(value):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                found = f"a part of type {part.get('type')!r}"
                raise BadRow("content part is not text", f"{field}[{index}]", found, "parts of type 'text'")
        value = "".join(part["text"] for part in value)
    if value is None:
        raise BadRow("empty text", field, "null", "text")
    if not isinstance(value, str):
        raise BadRow(f"{type(value).__name__} instead of text", field, shown(value), "text")
    if not blank_ok and not any(sign.isprintable() and not sign.isspace() for sign in value):
        raise BadRow("empty text", field, shown(value), "text that is not blank")
    return value


def messages_of(value: object, field: str, *, answer: bool = True) -> list[Message]:
    """Return a checked conversation; with `answer` it must hold a turn of the assistant that is trained."""
    if isinstance(value, str) and value.lstrip().startswith("["):  # a CSV cell
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRow("not a list of messages", field, shown(value), "a list of messages") from None
    if value is None or value == []:
        raise BadRow("no messages", field, shown(value), "a list of messages")
    if not isinstance(value, list):
        raise BadRow("not a list of messages", field, shown(value), "a list of messages")
    messages = [_message(item, f"{field}[{index}]") for index, item in enumerate(value)]
    if answer:
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise BadRow("no assistant turn", field, f"roles {', '.join(roles)}", "a turn of the assistant")
        if not any(m["role"] == "assistant" and m.get("weight", 1) for m in messages):
            raise BadRow("no trained turn", field, "weight 0 on every answer", "weight 1 on one answer")
    return messages


def _message(value: object, field: str) -> Message:
    if not isinstance(value, dict):
        raise BadRow("message is not an object", field, shown(value), "an object with role and content")
    role_key = "role" if value.get("role") is not None else "from"
    content_key = "content" if "content" in value else "value"
    if role_key == "from" and "from" not in value:
        raise BadRow("message without role", f"{field}.role", "nothing", ", ".join(ROLES))
    name = value[role_key]
    role = _SHAREGPT_ROLES.get(name, name) if isinstance(name, str) else name
    if not isinstance(role, str) or role not in ROLES:
        near = nearest(str(role), (*ROLES, *_SHAREGPT_ROLES))
        wanted = ", ".join(ROLES) + (f"; {near}" if near else "")
        raise BadRow("unknown role", f"{field}.{role_key}", shown(name), wanted)
    message: Message = {"role": role}
    message |= {key: value[key] for key in _KEPT_KEYS if value.get(key) is not None}
    weight = value.get("weight", value.get("train"))
    if weight is not None:
        if weight not in (0, 1):
            raise BadRow("weight is neither 0 nor 1", f"{field}.weight", shown(weight), "0 or 1")
        message["weight"] = int(weight)
    place = f"{field}.{content_key}"
    if value.get(content_key) is None and (role == "assistant" and message.get("tool_calls")):
        message["content"] = ""
        return message
    trained = role == "assistant" and message.get("weight", 1) == 1 and not message.get("tool_calls")
    try:
        message["content"] = text_of(value.get(content_key), place, blank_ok=not trained)
    except BadRow as error:
        if trained and error.reason == "empty text":
            raise BadRow("empty answer", place, error.found, "an answer") from None
        raise
    return message


def _chat(row: Row, name: str, messages: list[Message]) -> Example:
    tools = row.value.get("tools")
    notes = _control_notes(messages)
    tools = tools if isinstance(tools, list) and tools else None
    return Example(
        "chat", messages=messages, tools=tools, notes=notes, format=name, line=row.line, file=row.file
    )


def _control_notes(messages: list[Message]) -> tuple[str, ...]:
    marks = {mark for m in messages for mark in _CONTROL.findall(m["content"])}
    return tuple(f"control token {mark} in the text of a message" for mark in sorted(marks))


def _conversation(column: str) -> Callable[[Row, str], Example]:
    return lambda row, name: _chat(row, name, messages_of(row.value.get(column), column))


def _alpaca(row: Row, name: str) -> Example:
    value = row.value
    extra_key = "context" if "context" in value and "input" not in value else "input"
    answer_key = "response" if "response" in value and "output" not in value else "output"
    question = _optional(value.get("instruction"), "instruction")
    extra = _optional(value.get(extra_key), extra_key)
    question = "\n\n".join(part for part in (question, extra) if part.strip())
    if not question:
        raise BadRow("empty text", "instruction", shown(value.get("instruction")), "an instruction")
    system = _optional(value.get("system"), "system")
    messages = [{"role": "system", "content": system}] if system.strip() else []
    return _chat(row, name, messages + _turn(question, value, answer_key))


def _turn(question: str, value: dict[str, Any], key: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": _answer(value, key)}]


def _answer(value: dict[str, Any], key: str) -> str:
    try:
        return text_of(value.get(key), key)
    except BadRow as error:
        if error.reason != "empty text":
            raise
        found = error.found if key in value else "no such column"
        raise BadRow("empty answer", key, found, "an answer") from None


def _optional(value: object, field: str) -> str:
    return "" if value is None else text_of(value, field, blank_ok=True)


def _question(question: str, answer: str) -> Callable[[Row, str], Example]:
    return lambda row, name: _chat(
        row, name, _turn(text_of(row.value.get(question), question), row.value, answer)
    )


def _completion(row: Row, name: str) -> Example:
    value = row.value
    if isinstance(value.get("prompt"), list):
        prompt = [m | {"weight": 0} for m in messages_of(value["prompt"], "prompt", answer=False)]
        return _chat(row, name, prompt + messages_of(value.get("completion"), "completion"))
    prompt_text = _optional(value.get("prompt"), "prompt")
    answer = _answer(value, "completion")
    return Example(
        "completion", prompt=prompt_text, completion=answer, format=name, line=row.line, file=row.file
    )


def _text(row: Row, name: str) -> Example:
    return Example(
        "text", text=text_of(row.value.get("text"), "text"), format=name, line=row.line, file=row.file
    )


def _tokens(row: Row, name: str) -> Example:
    ids = _ids(row.value.get("input_ids"), "input_ids", lowest=0)
    labels = None
    if row.value.get("labels") is not None:
        labels = _ids(row.value["labels"], "labels", lowest=-100)
        if len(labels) != len(ids):
            wanted = f"{len(ids)}, as many as input_ids"
            raise BadRow("labels of another length", "labels", f"{len(labels)} labels", wanted)
        if all(label == -100 for label in labels):
            raise BadRow("no trained token", "labels", "-100 everywhere", "labels that are trained")
    return Example("tokens", input_ids=ids, labels=labels, format=name, line=row.line, file=row.file)


def _ids(value: object, field: str, *, lowest: int) -> list[int]:
    if not isinstance(value, list) or not value:
        raise BadRow("no token ids", field, shown(value), "a list of whole numbers")
    for index, item in enumerate(value):
        if type(item) is not int or item < lowest:
            raise BadRow("not a token id", f"{field}[{index}]", shown(item), f"a whole number >= {lowest}")
    return value


def _preference(row: Row, name: str) -> Example:
    value = row.value
    prompt = value.get("prompt")
    shared: list[Message] = []
    prompt_text = ""
    better: str | list[Message]
    worse: str | list[Message]
    if isinstance(value.get("chosen"), list):
        chosen = messages_of(value["chosen"], "chosen")
        rejected = messages_of(value.get("rejected"), "rejected")
        if isinstance(prompt, list):
            shared = messages_of(prompt, "prompt", answer=False)
        elif isinstance(prompt, str) and chosen[0]["role"] == "assistant":
            shared = [{"role": "user", "content": text_of(prompt, "prompt")}]
        else:  # the prompt is what both conversations begin with
            same = [a == b for a, b in zip(chosen, rejected, strict=False)]
            cut = min([*same, False].index(False), len(chosen) - 1, len(rejected) - 1)
            shared, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
        better, worse = chosen, rejected
    else:
        better, worse = _answer(value, "chosen"), _answer(value, "rejected")
        prompt_text = text_of(prompt, "prompt")
    if better == worse:
        raise BadRow("chosen equals rejected", "rejected", shown(worse), "two different answers")
    return Example(
        "preference",
        messages=shared,
        prompt=prompt_text,
        chosen=better,
        rejected=worse,
        format=name,
        line=row.line,
        file=row.file,
    )


def _kto(row: Row, name: str) -> Example:
    label = row.value.get("label")
    if not isinstance(label, bool):
        raise BadRow("label is not true or false", "label", shown(label), "true or false")
    pair = _completion(row, name)
    if pair.kind == "completion":
        return Example(
            "kto",
            prompt=pair.prompt,
            completion=pair.completion,
            label=label,
            format=name,
            line=row.line,
            file=row.file,
        )
    cut = len(row.value["prompt"])
    prompt = [{k: v for k, v in m.items() if k != "weight"} for m in pair.messages[:cut]]
    return Example(
        "kto",
        messages=prompt,
        completion=pair.messages[cut:],
        label=label,
        format=name,
        line=row.line,
        file=row.file,
    )


CONVERTERS: dict[str, Callable[[Row, str], Example]] = {
    "preference": _preference,
    "kto": _kto,
    "messages": _conversation("messages"),
    "sharegpt": _conversation("conversations"),
    "conversation": _conversation("conversation"),
    "alpaca": _alpaca,
    "pre-tokenised": _tokens,
    "prompt-completion": _completion,
    "prompt-response": _question("prompt", "response"),
    "question-answer": _question("question", "answer"),
    "text": _text,
}
"""One converter per name in `formats.FORMATS`."""
