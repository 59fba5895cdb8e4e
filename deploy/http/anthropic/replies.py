"""The shapes of replies, for the OpenAPI document. Replies are encoded without them."""

# No `from __future__ import annotations`: pydantic reads the annotations.
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AnthropicErrorBody(_Shape):
    """What went wrong, in Anthropic's words."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicError(_Shape):
    """Reply of every request that failed."""

    type: Literal["error"]
    error: AnthropicErrorBody


class OriginalCount(_Shape):
    """Tokens before the edits of `context_management`."""

    original_input_tokens: int


class TokenCount(_Shape):
    """Reply of `POST /v1/messages/count_tokens`."""

    input_tokens: int
    context_management: OriginalCount | None = None


class AppliedEdit(_Shape):
    """What an edit of `context_management` took out of the prompt."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919"]
    cleared_input_tokens: int
    cleared_thinking_turns: int | None = None
    cleared_tool_uses: int | None = None


class AppliedEdits(_Shape):
    """The edits that applied."""

    applied_edits: list[AppliedEdit]


class TextContent(_Shape):
    """A piece of the answer."""

    type: Literal["text"]
    text: str


class ThinkingContent(_Shape):
    """What the model thought. There is no signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(_Shape):
    """A call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(_Shape):
    """Numbers of tokens; those that the prefix cache had are not in `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(_Shape):
    """Reply of `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    ignored_tools: list[str] | None = None
    """Kinds of tools that the model didn't see; only where there are any."""
    context_management: AppliedEdits | None = None


class MessageStart(_Shape):
    """The first event: the message without content."""

    type: Literal["message_start"]
    message: MessageReply


class BlockStart(_Shape):
    """A block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: Content


class TextDelta(_Shape):
    """More of a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(_Shape):
    """More reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(_Shape):
    """The end of the reasoning."""

    type: Literal["signature_delta"]
    signature: str


class InputDelta(_Shape):
    """More of a call's input, as JSON text."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(_Shape):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(_Shape):
    """A block has ended."""

    type: Literal["content_block_stop"]
    index: int


class End(_Shape):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(_Shape):
    """The end of the message."""

    type: Literal["message_delta"]
    delta: End
    usage: MessageUsage
    context_management: AppliedEdits | None = None


class MessageStop(_Shape):
    """The last event."""

    type: Literal["message_stop"]


class MessageEvent(
    RootModel[MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop]
):
    """`data` of an event of `POST /v1/messages`."""
