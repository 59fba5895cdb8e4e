"""Items of a request's `input`, and the conversation that they are."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from deploy.http.body import (
    CONTENT_UNLESS_ASSISTANT,
    MAX_MESSAGES,
    Strict,
    check_content,
    encode_json,
    refusal,
    type_of,
)
from deploy.http.generation.arguments import Arguments, as_text
from deploy.http.generation.tool_use import called_with_text, full_name
from deploy.http.openai.messages import as_text_part
from deploy.http.openai.responses.tools import AnyTool


class _Part(Strict):
    """Unknown keys are ignored: clients send back what they got."""

    model_config = ConfigDict(extra="ignore")


class TextPart(_Part):
    """A piece of text: `input_text`, or `output_text` of an earlier response."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class ReasoningText(_Part):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "text"]
    text: str


def _refuse_media(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    value = [as_text_part(part) for part in value]
    for part in value:
        kind = type_of(part)
        if isinstance(kind, str) and kind not in ("input_text", "output_text", "text"):
            raise refusal(f"content of type {kind[:40]} is not supported.")
    return value


Content = Annotated[str | list[TextPart], BeforeValidator(_refuse_media)]


class MessageItem(_Part):
    """A message; `type` may be left out."""

    model_config = ConfigDict(json_schema_extra=CONTENT_UNLESS_ASSISTANT)

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content = ""

    @model_validator(mode="after")
    def _check_content(self) -> "MessageItem":
        check_content(self, self.role)
        return self


class ReasoningItem(_Part):
    """What an earlier response thought. Summaries and encrypted content aren't read."""

    type: Literal["reasoning"]
    content: list[ReasoningText] = Field(default_factory=list)


def _filled(data: Any, field: str) -> Any:
    """The item with "" where `field` is null: other servers' calls and results have it."""
    is_null = isinstance(data, dict) and field in data and data[field] is None
    return {**data, field: ""} if is_null else data


class FunctionCallItem(_Part):
    """A call in an earlier response; `arguments` are JSON, or what the model wrote instead."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments
    namespace: str = ""

    @model_validator(mode="before")
    @classmethod
    def _read_null(cls, data: Any) -> Any:
        return _filled(data, "arguments")


class CustomCallItem(_Part):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str = ""


class CallOutputItem(_Part):
    """What a called tool gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content

    @model_validator(mode="before")
    @classmethod
    def _read_null(cls, data: Any) -> Any:
        return _filled(data, "output")


class ToolsItem(_Part):
    """Tools that are there from the start, as if they stood in `tools`."""

    type: Literal["additional_tools"]
    tools: list[AnyTool]


class HostedItem(Strict):
    """A call of a tool that runs elsewhere, or what it gave, in a history that another server
    began. The model reads it as JSON."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(pattern=r"_(call|call_output|search_output)$", max_length=64)

    @property
    def fields(self) -> dict[str, Any]:
        """What is said of the call."""
        given = self.model_extra or {}
        return {key: value for key, value in given.items() if key not in _IDS}

    @property
    def name(self) -> str:
        """The tool."""
        return self.type.removesuffix("_output").removesuffix("_call")

    @property
    def call_id(self) -> str:
        """What a call and its output have in common."""
        given = self.model_extra or {}
        return str(given.get("call_id") or given.get("id") or self.name)

    @property
    def text(self) -> str:
        """All that is said, as the model reads it."""
        return encode_json(self.fields).decode()


_IDS = frozenset({"id", "call_id", "status", "execution"})
_KINDS = {
    "message": "message",
    "reasoning": "reasoning",
    "function_call": "function_call",
    "custom_tool_call": "custom_tool_call",
    "function_call_output": "call_output",
    "custom_tool_call_output": "call_output",
    "additional_tools": "additional_tools",
}
_REFUSED_CALLS = ("computer_call", "computer_call_output", "image_generation_call")
"""What they hold are images."""


def _kind_of(item: Any) -> str:
    kind = type_of(item)
    return "message" if kind is None else _KINDS.get(kind, "hosted")


def _refuse_others(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise refusal("input must be a string or a list of items.")
    for item in value:
        kind = type_of(item)
        is_known = isinstance(kind, str) and (kind in _KINDS or kind.endswith(("_call", "_output")))
        if kind in _REFUSED_CALLS or not (kind is None or is_known):
            raise refusal(f"Items of type {str(kind)[:40]} are not supported.")
    return value


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("call_output")]
    | Annotated[ToolsItem, Tag("additional_tools")]
    | Annotated[HostedItem, Tag("hosted")],
    Discriminator(_kind_of),
]
Input = Annotated[
    list[Item],
    Field(max_length=MAX_MESSAGES),
    BeforeValidator(_refuse_others, json_schema_input_type=str | list[Item]),
]
"""A text, which is a user's message, or a list of items."""


def for_template(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The conversation as chat templates read it. What an assistant thought, said and called in
    succession is one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                # What the model said behind calls belongs to the message that has them.
                last = messages[-1] if messages else {}
                message = last if "tool_calls" in last else _of_assistant(messages, "content")
                message["content"] = message.get("content", "") + _text_of(item.content)
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _text_of(item.content)})
            case ReasoningItem():
                thought = "".join(part.text for part in item.content)
                if thought:
                    message = _of_assistant(messages, "reasoning_content", "content", "tool_calls")
                    message["reasoning_content"] = thought
            case FunctionCallItem():
                name = full_name(item.name, item.namespace)
                _add_call(messages, item.call_id, {"name": name, "arguments": item.arguments})
            case CustomCallItem():
                name = full_name(item.name, item.namespace)
                _add_call(messages, item.call_id, called_with_text(name, item.input))
            case CallOutputItem():
                _add_output(messages, item.call_id, _text_of(item.output))
            case HostedItem() if item.type.endswith("_output"):
                _add_output(messages, item.call_id, item.text)
            case HostedItem():
                _add_call(messages, item.call_id, {"name": item.name, "arguments": item.fields})
    for message in messages:
        message.setdefault("content", "")
    return messages


def forget_thoughts(messages: list[dict[str, Any]]) -> None:
    """Take out what the assistant thought before the last user's message."""
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    for message in messages[: users[-1] if users else 0]:
        message.pop("reasoning_content", None)


def tools_of(items: Iterable[Item]) -> list[AnyTool]:
    """The tools that items bring."""
    return [tool for item in items if isinstance(item, ToolsItem) for tool in item.tools]


def num_chars(items: Iterable[Item]) -> int:
    """Characters of all texts."""
    return sum(len(_all_text(item)) for item in items)


def _add_call(messages: list[dict[str, Any]], call_id: str, function: dict[str, Any]) -> None:
    call = {"id": call_id, "type": "function", "function": function}
    _of_assistant(messages).setdefault("tool_calls", []).append(call)


def _add_output(messages: list[dict[str, Any]], call_id: str, output: str) -> None:
    messages.append({"role": "tool", "tool_call_id": call_id, "content": output})


def _of_assistant(messages: list[dict[str, Any]], *taken: str) -> dict[str, Any]:
    """The assistant's message at the end; a new one if there is none, or it has a key of `taken`
    already."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or any(key in last for key in taken):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text_of(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _all_text(item: Item) -> str:
    match item:
        case MessageItem():
            return _text_of(item.content)
        case ReasoningItem():
            return "".join(part.text for part in item.content)
        case FunctionCallItem():
            return item.name + as_text(item.arguments)
        case CustomCallItem():
            return item.name + item.input
        case CallOutputItem():
            return _text_of(item.output)
        case ToolsItem():
            return ""
        case HostedItem():
            return item.text
