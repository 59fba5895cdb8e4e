"""`context_management`: edits of a conversation before the model reads it, as in Anthropic's API.

The client keeps its whole history. What an edit takes out is taken out of the prompt alone, and the
reply says how much that was (`applied_edits`).
"""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from deploy.http.body import Strict

Messages = Sequence[Mapping[str, Any]]
"""A conversation as chat templates read it."""
Count = Callable[[Messages], Awaitable[int]]
"""Tokens of the prompt that a conversation becomes."""

CLEARED = "[This result was removed to keep the conversation short.]"
_MAX_INT = 2**31 - 1
Number = Annotated[int, Field(ge=0, le=_MAX_INT)]


class InputTokens(Strict):
    """A number of tokens of the prompt."""

    type: Literal["input_tokens"]
    value: Number


class ToolUses(Strict):
    """A number of calls."""

    type: Literal["tool_uses"]
    value: Number


class ThinkingTurns(Strict):
    """A number of the assistant's turns, the last ones; or all."""

    type: Literal["thinking_turns", "all"]
    value: Number = 1


class ClearThinking(Strict):
    """Takes out the reasoning of all turns but the last ones. A turn goes from one user's message
    to the next, calls included."""

    type: Literal["clear_thinking_20251015"]
    keep: ThinkingTurns | Literal["all"] = ThinkingTurns(type="thinking_turns")

    counted: ClassVar[str] = "cleared_thinking_turns"

    def apply(self, messages: Messages) -> tuple[Messages, int]:
        """The conversation without them, and how many turns have lost their reasoning."""
        if self.keep == "all" or self.keep.type == "all":
            return messages, 0
        turns, turn = [], 0
        for message in messages:
            turn += message["role"] == "user"
            turns.append(turn)
        thought = sorted(
            {turn for turn, each in zip(turns, messages, strict=True) if _thinks(each)}
        )
        forgotten = set(thought[: max(len(thought) - self.keep.value, 0)])
        edited = [
            {key: value for key, value in message.items() if key != "reasoning_content"}
            if turn in forgotten
            else message
            for turn, message in zip(turns, messages, strict=True)
        ]
        return edited, len(forgotten)


class ClearToolUses(Strict):
    """Puts a short notice in place of old results of tools, once the conversation is long."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokens | ToolUses, Field(discriminator="type")] = InputTokens(
        type="input_tokens", value=100_000
    )
    keep: ToolUses = ToolUses(type="tool_uses", value=3)
    clear_at_least: InputTokens | None = None
    exclude_tools: list[str] = Field(default_factory=list)
    clear_tool_inputs: bool | list[str] = False
    """Whether arguments are taken out, too; or of which tools."""

    counted: ClassVar[str] = "cleared_tool_uses"

    def apply(self, messages: Messages) -> tuple[Messages, int]:
        """The conversation without them, and how many calls they were of."""
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        old = {
            call["id"]
            for call in calls[: max(len(calls) - self.keep.value, 0)]
            if call["function"]["name"] not in self.exclude_tools
        }
        cleared = 0
        edited = []
        for message in messages:
            if message["role"] == "tool" and message["tool_call_id"] in old:
                if message["content"] != CLEARED:
                    cleared += 1
                message = {**message, "content": CLEARED}
            elif "tool_calls" in message:
                shown = [self._without_input(call, old) for call in message["tool_calls"]]
                message = {**message, "tool_calls": shown}
            edited.append(message)
        return edited, cleared

    def _without_input(self, call: dict[str, Any], old: set[str]) -> dict[str, Any]:
        which, function = self.clear_tool_inputs, call["function"]
        clears = which if isinstance(which, bool) else function["name"] in which
        if not clears or call["id"] not in old:
            return call
        return {**call, "function": {**function, "arguments": {}}}


class Compact(Strict):
    """Where Anthropic's servers would sum up the conversation. Here a longer prompt is refused."""

    type: Literal["compact_20260112"]
    trigger: InputTokens = InputTokens(type="input_tokens", value=150_000)
    instructions: str | None = None
    pause_after_compaction: bool = False


Edit = Annotated[ClearThinking | ClearToolUses | Compact, Field(discriminator="type")]


class ContextManagement(Strict):
    """Edits in the order in which they are made."""

    edits: list[Edit] = Field(default_factory=list)

    @property
    def compact_above(self) -> int | None:
        """Tokens above which the conversation was to be summed up."""
        limits = [edit.trigger.value for edit in self.edits if isinstance(edit, Compact)]
        return min(limits, default=None)


class EditedConversation(NamedTuple):
    """A conversation, and what was taken out of it, as the reply tells it."""

    messages: Messages
    applied: list[dict[str, Any]]


async def edit_conversation(
    messages: Messages, edits: Sequence[Edit], count: Count
) -> EditedConversation:
    """Make the edits that apply. Raises what `count` raises."""
    applied: list[dict[str, Any]] = []
    length: int | None = None
    for edit in edits:
        if isinstance(edit, Compact):
            continue
        edited, number = edit.apply(messages)
        if not number:
            continue
        length = await count(messages) if length is None else length
        if not _is_due(edit, messages, length):
            continue
        shorter = await count(edited)
        saved = length - shorter
        least = edit.clear_at_least if isinstance(edit, ClearToolUses) else None
        if least is not None and saved < least.value:
            continue
        messages, length = edited, shorter
        applied.append(
            {"type": edit.type, edit.counted: number, "cleared_input_tokens": max(saved, 0)}
        )
    return EditedConversation(messages, applied)


def _is_due(edit: ClearThinking | ClearToolUses, messages: Messages, length: int) -> bool:
    """Whether the conversation, whose prompt has `length` tokens, is as long as the edit waits
    for."""
    if isinstance(edit, ClearThinking):
        return True
    if edit.trigger.type == "input_tokens":
        return length > edit.trigger.value
    calls = sum(len(message.get("tool_calls", ())) for message in messages)
    return calls > edit.trigger.value


def _thinks(message: Mapping[str, Any]) -> bool:
    return bool(message.get("reasoning_content"))
