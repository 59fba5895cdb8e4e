"""Blocks of a message's content, and the messages for a chat template that they are."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator

from deploy.http.body import Strict, encode_json, refusal, type_of
from deploy.http.generation.arguments import Arguments, as_text

INVALID_JSON = "INVALID_JSON"
"""The one key of a call's input that is no JSON object: its text."""


class Part(Strict):
    """Unknown keys are ignored: clients send back what they got, and `cache_control`."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(Part):
    """A piece of text."""

    type: Literal["text"]
    text: str


class TextSource(Part):
    """A document that is text."""

    type: Literal["text"]
    data: str


class BlockSource(Part):
    """A document that is text in blocks."""

    type: Literal["content"]
    content: str | list[TextBlock]


class DocumentBlock(Part):
    """A document; the model reads title, context and text."""

    type: Literal["document"]
    source: Annotated[TextSource | BlockSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """What the model reads."""
        source = self.source
        text = source.data if isinstance(source, TextSource) else text_of(source.content)
        return "\n".join(filter(None, [self.title, self.context, text]))


class SearchResultBlock(Part):
    """What a search of the client's found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]

    @property
    def text(self) -> str:
        """What the model reads."""
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class CompactionBlock(Part):
    """The summary that stands for an earlier part of the conversation."""

    type: Literal["compaction"]
    content: str | None = None

    @property
    def text(self) -> str:
        """The summary."""
        return self.content or ""


class ThinkingBlock(Part):
    """What an earlier reply thought."""

    type: Literal["thinking"]
    thinking: str = ""


class RedactedBlock(Part):
    """Reasoning that only Anthropic's servers can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Part):
    """A call in an earlier reply: of a tool of the client's, or of one that ran elsewhere."""

    type: Literal["tool_use", "server_tool_use", "mcp_tool_use"]
    id: str
    name: str
    input: Arguments = Field(default_factory=dict)

    @property
    def arguments(self) -> str | dict[str, Any]:
        """What the model wrote."""
        given = self.input
        if isinstance(given, dict) and given.keys() == {INVALID_JSON}:
            text = given[INVALID_JSON]
            return text if isinstance(text, str) else given
        return given


class ToolResultBlock(Part):
    """What a called tool gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list["ResultPart"] = ""
    is_error: bool = False

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_media(cls, value: Any) -> Any:
        return refuse_media(value)

    @property
    def text(self) -> str:
        """What the model reads."""
        return text_of(self.content)


class HostedResultBlock(Part):
    """What a tool gave that ran elsewhere; the model reads it as JSON."""

    type: str = Field(pattern=r"_tool_result$", max_length=64)
    tool_use_id: str
    content: Any = ""

    @property
    def text(self) -> str:
        """What the model reads."""
        given = self.content
        return given if isinstance(given, str) else encode_json(given).decode()


ResultPart = Annotated[TextBlock | DocumentBlock | SearchResultBlock, Field(discriminator="type")]
OF_ASSISTANT = (ToolUseBlock, ThinkingBlock, RedactedBlock, HostedResultBlock)
"""Blocks that only an assistant's message has."""
_KINDS = {
    **{name: name for name in ("text", "document", "search_result", "compaction", "thinking")},
    **{name: name for name in ("redacted_thinking", "tool_result")},
    **dict.fromkeys(("tool_use", "server_tool_use", "mcp_tool_use"), "tool_use"),
}


def _kind_of(block: Any) -> str | None:
    kind = type_of(block)
    if not isinstance(kind, str):
        return None
    return _KINDS.get(kind, "hosted_result")


def refuse_media(value: Any) -> Any:
    """Refuse content that has other blocks than those below, by name."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refusal("content of a message must be a string or a list of blocks.")
    for block in value:
        kind = type_of(block)
        if isinstance(kind, str) and kind not in _KINDS and not kind.endswith("_tool_result"):
            raise refusal(f"content of type {kind[:40]} is not supported.")
        source = block.get("source") if kind == "document" else None
        form = source.get("type") if isinstance(source, dict) else None
        if isinstance(form, str) and form not in ("text", "content"):
            raise refusal(f"content of type document with a {form[:40]} source is not supported.")
    return value


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[CompactionBlock, Tag("compaction")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[HostedResultBlock, Tag("hosted_result")],
    Discriminator(_kind_of),
]


def messages_of(role: str, blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """What chat templates read. A result is a message of its own: a client's stand before what the
    user says, one of a tool that ran elsewhere behind its call."""
    results: list[dict[str, Any]] = []
    message: dict[str, Any] = {}
    for block in blocks:
        match block:
            case ThinkingBlock():
                message.setdefault("reasoning_content", []).append(block.thinking)
            case RedactedBlock():
                pass
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.arguments}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case ToolResultBlock() | HostedResultBlock():
                if message and isinstance(block, HostedResultBlock):
                    results.append(_joined(role, message))
                    message = {}
                result = {"tool_call_id": block.tool_use_id, "content": block.text}
                results.append({"role": "tool", **result})
            case _:
                message.setdefault("content", []).append(block.text)
    return [*results, _joined(role, message)] if message or not results else results


def _joined(role: str, message: dict[str, Any]) -> dict[str, Any]:
    joined: dict[str, Any] = {"role": role, "content": "\n".join(message.get("content", []))}
    if "reasoning_content" in message:
        joined["reasoning_content"] = "\n".join(message["reasoning_content"])
    if "tool_calls" in message:
        joined["tool_calls"] = message["tool_calls"]
    return joined


def text_of(content: str | Iterable[ResultPart]) -> str:
    """The text of blocks."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def length_of(block: Block) -> int:
    """Characters of a block."""
    match block:
        case RedactedBlock():
            return 0
        case ThinkingBlock():
            return len(block.thinking)
        case ToolUseBlock():
            return len(as_text(block.input))
        case _:
            return len(block.text)
