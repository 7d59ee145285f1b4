"""A conversation as it stands in a row, checked: roles, texts, weights, and what is odd about them."""

from __future__ import annotations

import re

from soup_flows.data.jsonlines import parse_cell
from soup_flows.data.values import Message, shown
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
CONTROL_NOTE = "control token"
"""How the note about a control token in a message begins."""
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
            value = parse_cell(value)
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


def control_notes(messages: list[Message]) -> tuple[str, ...]:
    """Return a note for each control token that stands in the text of a message."""
    marks = {mark for m in messages for mark in _CONTROL.findall(m["content"])}
    return tuple(f"{CONTROL_NOTE} {mark} in the text of a message" for mark in sorted(marks))
