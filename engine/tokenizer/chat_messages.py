"""Messages of a chat as templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from engine.errors import RequestError

_TEXT_PARTS = ("text", "input_text", "output_text")


def normalize_message(
    message: Mapping[str, Any], index: int = 0, *, keep_parts: bool = False
) -> dict[str, Any]:
    """The message in the form that templates know.

    Text parts are joined by newlines, as in vLLM, or with `keep_parts` stay a list of
    {"type": "text", "text"}. Arguments of tool calls become objects, which templates iterate or
    write as JSON. `index`: place of the message, for errors.
    Raises `RequestError` for content that isn't text and arguments that aren't a JSON object.
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
        normal["tool_calls"] = [
            _normalize_call(call, f"messages[{index}].tool_calls[{i}]")
            for i, call in enumerate(calls)
        ]
    return normal


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


def _normalize_call(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = _parse_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_arguments(arguments: Any, where: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} must be a JSON object: {error}", where) from error
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} must be a JSON object, not {type(arguments).__name__}", where)
    return arguments


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't JSON")
