"""Messages of a chat as templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from engine.errors import RequestError

_TEXT_PARTS = ("text", "input_text", "output_text")
_MAX_DEPTH = 100
"""Of arguments that are read as an object: templates and the search for names are recursive."""


def normalize_message(message: Mapping[str, Any], *, keep_parts: bool = False) -> dict[str, Any]:
    """The message in the form that templates know.

    Text parts are joined by newlines, as in vLLM, or with `keep_parts` stay a list of
    {"type": "text", "text"}. Arguments of tool calls become objects, which templates iterate or
    write as JSON; those that hold no object stay the text that they are, because a model wrote it
    and is to read it again.
    Raises `RequestError` for content that isn't text.
    """
    if not isinstance(message, Mapping):
        raise RequestError("each message must be an object with a role and content", "messages")
    normal = dict(message)
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        texts = [_text_of(part) for part in content]
        normal["content"] = (
            [{"type": "text", "text": text} for text in texts] if keep_parts else "\n".join(texts)
        )
    if isinstance(calls, list):
        normal["tool_calls"] = [_normalize_call(call) for call in calls]
    return normal


def with_one_system_message(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with all system messages as one at the beginning; None if they are so already.

    Agents put instructions between turns, and many templates refuse that.
    """
    systems = [message for message in messages if message.get("role") == "system"]
    if not systems or (messages[0].get("role") == "system" and len(systems) == 1):
        return None
    contents = [message.get("content") or "" for message in systems]
    others = [dict(message) for message in messages if message.get("role") != "system"]
    if all(isinstance(content, str) for content in contents):
        return [{"role": "system", "content": "\n\n".join(contents)}, *others]
    parts = [
        part
        for content in contents
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]
    return [{"role": "system", "content": parts}, *others]


def _text_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise RequestError(
            f"content part of type '{kind}': the model takes text only, as "
            '{"type": "text", "text": "..."}',
            "messages",
        )
    text: str = part["text"]
    return text


def _normalize_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = _read_arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _read_arguments(given: Any) -> dict[str, Any] | str:
    """The object of a call's arguments, or their text if they hold none. None and empty texts are
    no arguments. JSON in a JSON string is read, too (some clients encode twice)."""
    value = given
    for _ in range(2):
        if not isinstance(value, str) or not value.strip():
            break
        try:
            value = json.loads(
                value, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeated
            )
        except (ValueError, RecursionError):
            break
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, dict) and _can_be_written(value):
        return value
    return given if isinstance(given, str) else json.dumps(given)


def _can_be_written(value: dict[str, Any]) -> bool:
    """Whether a template can write the object as JSON of valid Unicode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return _depth(value) <= _MAX_DEPTH


def _depth(value: Any) -> int:
    """How deep the value is nested, at most `_MAX_DEPTH` + 1."""
    level, depth = [value], 0
    while level and depth <= _MAX_DEPTH:
        depth += 1
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [
            item for items in inner for item in items if isinstance(item, dict | list) and item
        ]
    return depth


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object would lose all but one value of a key")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't JSON")
