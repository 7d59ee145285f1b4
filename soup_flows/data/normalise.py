"""One converter per format: a row in, an `Example` out, or `BadRow` with the exact place of the fault.

Nothing is coerced: a number or a list where text should be is a fault, never printed into the training text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from soup_flows.data.jsonlines import parse_cell
from soup_flows.data.messages import BadRow, control_notes, messages_of, text_of
from soup_flows.data.values import Example, Message, Row, shown

_LABELS = {"true": True, "false": False}
"""What a CSV cell may hold as `label`."""


def _chat(row: Row, name: str, messages: list[Message]) -> Example:
    messages = _with_system(row.value, messages)
    notes = control_notes(messages)
    tools = _tools(row.value.get("tools"))
    return Example(
        "chat", messages=messages, tools=tools, notes=notes, format=name, line=row.line, file=row.file
    )


def _with_system(value: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Put the column `system`, which ShareGPT and Alpaca files have, before the conversation."""
    system = _optional(value.get("system"), "system")
    if not system.strip():
        return messages
    if messages and messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] == system:
            return messages
        raise BadRow("two system prompts", "system", shown(system), "a system column or a system message")
    return [{"role": "system", "content": system}, *messages]


def _no_system(value: dict[str, Any]) -> None:
    """Refuse a system prompt beside a prompt of plain text, in which it has no place."""
    if _optional(value.get("system"), "system").strip():
        raise BadRow(
            "system prompt beside plain text", "system", shown(value["system"]), "messages as the prompt"
        )


def _tools(value: object) -> list[Any] | None:
    """Return tool schemas, given as a list or as JSON text (how datasets and TRL store them)."""
    if isinstance(value, str) and value.strip():
        try:
            value = parse_cell(value)
        except ValueError:
            raise BadRow("tools are not JSON", "tools", shown(value), "a list of tool schemas") from None
    if value is None or value in ("", []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow("tools are not a list of schemas", "tools", shown(value), "a list of tool schemas")
    return value


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
    return _chat(row, name, _history(value.get("history")) + _turn(question, value, answer_key))


def _history(value: object) -> list[Message]:
    """Return earlier turns of an Alpaca row: a list of [instruction, answer] (LLaMA-Factory's data format)."""
    messages: list[Message] = []
    if value is None or value == []:
        return messages
    pairs = value if isinstance(value, list) else None
    if pairs is None or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadRow(
            "history is not a list of pairs", "history", shown(value), "[[instruction, answer], ...]"
        )
    for index, (question, answer) in enumerate(pairs):
        place = f"history[{index}]"
        messages.append({"role": "user", "content": text_of(question, f"{place}[0]")})
        messages.append({"role": "assistant", "content": text_of(answer, f"{place}[1]")})
    return messages


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
    dialogue = _dialogue(value)
    if dialogue:
        asked, answer = dialogue
        return _chat(row, name, [m | {"weight": 0} for m in asked] + answer)
    _no_system(value)
    prompt_text = _optional(value.get("prompt"), "prompt")
    text = _answer(value, "completion")
    return Example(
        "completion", prompt=prompt_text, completion=text, format=name, line=row.line, file=row.file
    )


def _dialogue(value: dict[str, Any]) -> tuple[list[Message], list[Message]] | None:
    """Return the prompt and the answer of a row as messages, or None if both are plain text."""
    prompt, completion = value.get("prompt"), value.get("completion")
    if not (_is_chat(prompt) or _is_chat(completion)):
        return None
    if isinstance(prompt, str) and prompt.strip():
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": _answer(value, "completion")}]
    asked: list[Message] = messages_of(prompt, "prompt", answer=False)
    for message in asked:
        message.pop("weight", None)
    return asked, _reply(_without(asked, messages_of(completion, "completion")), "completion")


def _is_chat(value: object) -> bool:
    """Whether a value is a list of messages and not of content parts; a wrong list is reported as messages."""
    return isinstance(value, list) and not all(
        isinstance(item, dict) and "type" in item and not {"role", "from"} & set(item) for item in value
    )


def _text(row: Row, name: str) -> Example:
    return Example(
        "text", text=text_of(row.value.get("text"), "text"), format=name, line=row.line, file=row.file
    )


def _tokens(row: Row, name: str) -> Example:
    ids = _ids(row.value.get("input_ids"), "input_ids")
    labels: list[int] | None = None
    if row.value.get("labels") is not None:
        labels = _ids(row.value["labels"], "labels", also=-100)
        if len(labels) != len(ids):
            wanted = f"{len(ids)}, as many as input_ids"
            raise BadRow("labels of another length", "labels", f"{len(labels)} labels", wanted)
        if all(label == -100 for label in labels):
            raise BadRow("no trained token", "labels", "-100 everywhere", "labels that are trained")
        for index, (label, token) in enumerate(zip(labels, ids, strict=True)):
            if label not in (-100, token):  # labels shifted beforehand would be shifted twice
                found, wanted = f"{label}, input_ids[{index}] is {token}", "input_ids, or -100; not shifted"
                raise BadRow("labels are not the tokens", f"labels[{index}]", found, wanted)
    ids, labels = _unpadded(ids, labels, row.value.get("attention_mask"))
    return Example("tokens", input_ids=ids, labels=labels, format=name, line=row.line, file=row.file)


def _unpadded(ids: list[int], labels: list[int] | None, mask: object) -> tuple[list[int], list[int] | None]:
    """Cut off what the attention mask marks as padding."""
    if mask is None:
        return ids, labels
    field = "attention_mask"
    if not isinstance(mask, list) or len(mask) != len(ids) or any(bit not in (0, 1) for bit in mask):
        raise BadRow("not an attention mask", field, shown(mask), f"{len(ids)} zeros and ones")
    start, end = mask.index(1) if 1 in mask else 0, len(mask) - (mask[::-1].index(1) if 1 in mask else 0)
    if not all(mask[start:end]):
        raise BadRow("not an attention mask", field, shown(mask), "zeros at the ends only: padding")
    return ids[start:end], None if labels is None else labels[start:end]


def _ids(value: object, field: str, *, also: int = 0) -> list[int]:
    if not isinstance(value, list) or not value:
        raise BadRow("no token ids", field, shown(value), "a list of whole numbers")
    for index, item in enumerate(value):
        if type(item) is not int or (item < 0 and item != also):
            wanted = "a whole number >= 0" + (f", or {also}" if also else "")
            raise BadRow("not a token id", f"{field}[{index}]", shown(item), wanted)
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
            chosen, rejected = _without(shared, chosen), _without(shared, rejected)
        elif isinstance(prompt, str) and chosen[0]["role"] == "assistant":
            shared = [{"role": "user", "content": text_of(prompt, "prompt")}]
        else:  # the prompt is what both conversations begin with
            same = [a == b for a, b in zip(chosen, rejected, strict=False)]
            cut = min([*same, False].index(False), len(chosen) - 1, len(rejected) - 1)
            shared, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
        shared = _with_system(value, shared)
        better, worse = _reply(chosen, "chosen"), _reply(rejected, "rejected")
    else:
        _no_system(value)
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


def _without(prompt: list[Message], messages: list[Message]) -> list[Message]:
    """Return the messages after the prompt: some data sets repeat it at the head of each answer."""
    return messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages


def _reply(messages: list[Message], field: str) -> list[Message]:
    """Return the messages if they are an answer: a question in them would be learned, or told apart, as one."""
    if not messages or messages[0]["role"] != "assistant" or messages[-1]["role"] != "assistant":
        found = ", ".join(message["role"] for message in messages) or "nothing after the prompt"
        wanted = "assistant first and last; both answers follow the same prompt"
        raise BadRow("answer is not the assistant's", field, found, wanted)
    return messages


def _kto(row: Row, name: str) -> Example:
    given = row.value.get("label")
    label = _LABELS.get(given.strip().lower()) if isinstance(given, str) else given
    if not isinstance(label, bool):
        raise BadRow("label is not true or false", "label", shown(given), "true or false")
    dialogue = _dialogue(row.value)
    if not dialogue:
        return replace(_completion(row, name), kind="kto", label=label)
    asked, answer = dialogue
    return Example(
        "kto",
        messages=_with_system(row.value, asked),
        completion=answer,
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
