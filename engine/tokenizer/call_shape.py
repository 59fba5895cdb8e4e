"""`CallShape`: in which form a chat template reads the calls of earlier replies.

Templates differ: some write arguments as JSON, others join them as strings; some show calls only
beside a content that is none, others one call a message. What doesn't fit is an error, or the calls
are missing in the prompt. So each template is tried out with a short conversation, once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]

SHORT_ID = 9
"""Characters of the ids that Mistral's templates demand."""
_NAME, _OTHER_NAME = "probed_function", "second_function"
_KEY, _VALUE = "probed_key", "probed value"
_TEXT = "probed text"
_LONG_ID = "call_0123456789abcdef01234567"
_BROKEN = '{"' + _KEY + '": "' + _VALUE


class CallShape(NamedTuple):
    """What to make of messages with calls, so that the template shows the calls."""

    arguments: Literal["object", "text"] = "object"
    takes_text: bool = True
    """Arguments that aren't a JSON object may be given as their text."""
    content: Literal["empty", "none", "absent"] = "empty"
    """The content of a message that has nothing but calls."""
    parallel: bool = True
    """A message may have several calls."""
    beside: Literal["kept", "apart", "written"] = "kept"
    """Text beside calls: it stays there; it is a message of its own before them; or the calls
    are written behind it, into the content."""
    short_ids: bool = False
    """Ids have `SHORT_ID` characters."""
    is_read: bool = True
    """False: the template doesn't know calls, so they are written into the content."""

    def arrange(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in this shape, but for calls that `write` puts into the content."""
        if self.short_ids:
            messages = _with_short_ids(messages)
        return [made for message in messages for made in self._arrange(message)]

    def write(self, message: Message) -> Message:
        """`message` with its calls in the content, if the template wouldn't show them."""
        calls = message.get("tool_calls")
        if not calls or not (not self.is_read or (self.beside == "written" and _has_text(message))):
            return message
        written = [text for call in calls if (text := _written(call))]
        content = message.get("content") or ""
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        if isinstance(content, list):
            parts = [{"type": "text", "text": text} for text in written]
            return {**rest, "content": [*content, *parts]}
        return {**rest, "content": "\n".join([content, *written] if content else written)}

    def _arrange(self, message: Message) -> list[Message]:
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, list):
            return [message]
        message = {**message, "tool_calls": [self._with_arguments(call) for call in calls]}
        if not self.is_read or (self.beside == "written" and _has_text(message)):
            return [message]
        made = [message]
        if self.beside == "apart" and _has_text(message):
            first = {key: value for key, value in message.items() if key != "tool_calls"}
            made = [
                first,
                {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]},
            ]
        if not self.parallel:
            *before, last = made
            one_each = [{**last, "tool_calls": [call]} for call in last["tool_calls"]]
            others = [
                {"role": last["role"], "content": "", "tool_calls": m["tool_calls"]}
                for m in one_each[1:]
            ]
            made = [*before, one_each[0], *others]
        return [self._with_content(each) for each in made]

    def _with_content(self, message: Message) -> Message:
        if not message.get("tool_calls") or _has_text(message):
            return message
        if self.content == "absent":
            return {key: value for key, value in message.items() if key != "content"}
        return {**message, "content": "" if self.content == "empty" else None}

    def _with_arguments(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        given = function.get("arguments")
        if self.arguments == "text" or not self.is_read:
            given = as_text(given)
        elif isinstance(given, str) and not self.takes_text:
            given = {"arguments": given}
        return {**call, "function": {**function, "arguments": given}}


def find_call_shape(render: Render) -> CallShape:
    """The shape in which `render`, which raises the template's errors, shows all of a call."""
    for turns, short_ids, arguments, content in product(
        (_FULL, _WITH_RESULT, _ALONE),
        (False, True),
        ("object", "text"),
        ("empty", "none", "absent"),
    ):
        shape = CallShape(arguments, content=content, short_ids=short_ids)  # type: ignore[arg-type]
        probe = _Probe(render, turns)
        if probe.shows(shape):
            return _refine(probe, shape)
    return CallShape(is_read=False)


def _refine(probe: _Probe, shape: CallShape) -> CallShape:
    """`shape`, which shows a call, with what holds of several calls, of text and of broken
    arguments."""
    one_each = shape._replace(parallel=False)
    if not probe.shows(shape, num_calls=2) and probe.shows(one_each, num_calls=2):
        shape = one_each
    if not probe.shows(shape, text=_TEXT):
        for beside in ("apart", "kept", "written"):
            other = shape._replace(beside=beside)
            # Some templates drop the text by design; then at least the call is shown.
            if probe.shows(other, text=_TEXT, is_lost=beside == "kept"):
                shape = other
                break
    if shape.arguments == "object" and not probe.shows(shape, arguments=_BROKEN):
        shape = shape._replace(takes_text=False)
    return shape


class _Probe(NamedTuple):
    """A conversation with calls, to be rendered. `turns`: what follows the calls."""

    render: Render
    turns: tuple[str, ...]

    def shows(
        self,
        shape: CallShape,
        *,
        num_calls: int = 1,
        text: str = "",
        arguments: Any = None,
        is_lost: bool = False,
    ) -> bool:
        """Whether the prompt holds all of the calls, and the text unless `is_lost`."""
        arguments = {_KEY: _VALUE} if arguments is None else arguments
        names = (_NAME, _OTHER_NAME)[:num_calls]
        calls: list[Any] = [
            {
                "id": f"{_LONG_ID}{name}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name in names
        ]
        chat: list[Message] = [{"role": "user", "content": "a"}]
        chat.append({"role": "assistant", "content": text, "tool_calls": calls})
        for turn in self.turns:
            if turn != "tool":
                chat.append({"role": turn, "content": "b"})
                continue
            chat += [
                {"role": turn, "tool_call_id": call["id"], "name": name, "content": "c"}
                for call, name in zip(calls, names, strict=True)
            ]
        try:
            prompt = self.render([shape.write(message) for message in shape.arrange(chat)])
        except Exception:  # the template is a program that wants another shape
            return False
        wanted = [*names, _KEY, _VALUE] + ([text] if text and not is_lost else [])
        is_whole = all(word in prompt for word in wanted) and prompt.count(_VALUE) >= num_calls
        # An object that was printed as a whole has Python's quotes; JSON in JSON has backslashes.
        is_clean = f"'{_KEY}'" not in prompt and f'\\"{_KEY}' not in prompt
        return is_whole and (is_clean or isinstance(arguments, str))


_FULL = ("tool", "assistant", "user")
_WITH_RESULT = ("tool",)
_ALONE: tuple[str, ...] = ()


def as_text(arguments: Any) -> str:
    """Arguments as JSON, or as the text that they are."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _written(call: Any) -> str:
    """A call as Hermes' and Qwen's models write it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return ""
    name = json.dumps(function.get("name"), ensure_ascii=False)
    arguments = as_text(function.get("arguments"))
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _has_text(message: Message) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        return any(isinstance(part, dict) and part.get("text") for part in content)
    return bool(content)


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages with ids of `SHORT_ID` letters and digits. A call and its result keep the same
    one. What has no id gets one: a result that of the first call which has none yet."""
    waiting: list[str] = []
    made = []
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            named = [
                {**call, "id": _short_id(call.get("id") or f"{index}.{number}")}
                if isinstance(call, dict)
                else call
                for number, call in enumerate(calls)
            ]
            waiting = [call["id"] for call in named if isinstance(call, dict)]
            message = {**message, "tool_calls": named}
        elif message.get("role") == "tool":
            given = message.get("tool_call_id")
            unnamed = waiting[0] if waiting else _short_id(str(index))
            short = _short_id(given) if given else unnamed
            if short in waiting:
                waiting.remove(short)
            message = {**message, "tool_call_id": short}
        made.append(message)
    return made


def _short_id(given: Any) -> str:
    text = str(given)
    if len(text) == SHORT_ID and text.isascii() and text.isalnum():
        return text
    return hashlib.blake2b(text.encode(errors="replace")).hexdigest()[:SHORT_ID]
