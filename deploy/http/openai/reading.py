"""How the outputs of a chat are read: as text, or as reasoning, tool calls and text."""

from __future__ import annotations

import secrets
from typing import Any

from deploy.http.engine_client import EngineClient, ModelInfo
from deploy.http.openai.sse import encode_json
from deploy.http.openai.tools import ToolUse
from deploy.http.parsers.output_parser import OutputParser
from deploy.http.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text
from deploy.http.parsers.reasoning_parser import END, START, ReasoningParser
from engine.constraints.grammar_payload import Thinking

_TAIL = 8
"""Tokens at a prompt's end that are looked at; `START` and a line end are up to six."""


async def find_thinking(client: EngineClient, info: ModelInfo, ids: list[int]) -> Thinking | None:
    """How the output to a prompt of token ids begins to reason; None if the model doesn't."""
    if not info.reasons:
        return None
    tail = await client.decode(ids[-_TAIL:])
    return Thinking(START, END, is_open=tail.rstrip().endswith(START))


class OutputReading:
    """What the outputs of one request are read for."""

    def __init__(self, tools: ToolUse, thinking: Thinking | None) -> None:
        self.thinking = thinking
        self._tools = tools

    @property
    def parses(self) -> bool:
        """Whether outputs consist of more than text."""
        return self.thinking is not None or self._tools.format is not None

    def read(self) -> OutputState:
        """The state of a new output."""
        tools, thinking = self._tools, self.thinking
        parser = OutputParser(
            None if thinking is None else ReasoningParser(thinking.is_open),
            None if tools.format is None else tools.format.parser(tools.names),
            tools.max_calls,
            not tools.must_call,
        )
        id_length = tools.format.id_length if tools.format is not None else 0
        return OutputState(parser, id_length, ends_with_calls=not tools.is_named)


class OutputState:
    """The parts of one output so far, and those that weren't sent yet."""

    def __init__(self, parser: OutputParser, id_length: int, ends_with_calls: bool) -> None:
        """`ends_with_calls`: an output with calls has the finish reason `tool_calls` (OpenAI's
        servers say `stop` where the request named the function)."""
        self._parser = parser
        self._id_length = id_length
        self._ends_with_calls = ends_with_calls
        self.unsent: list[Part] = []
        self.num_reasoning = 0
        """Tokens of reasoning."""

    def add(self, text: str, num_output: int, has_ended: bool) -> None:
        """More of the output: `num_output` tokens in all so far."""
        was_reasoning = self._parser.is_reasoning
        self.unsent += self._parser.feed(text)
        if was_reasoning and self._parser.has_reasoned:
            self.num_reasoning = num_output
        if has_ended:
            self.unsent += self._parser.finish()

    def take(self) -> list[Part]:
        """The parts that weren't sent yet."""
        parts, self.unsent = self.unsent, []
        return parts

    def finish_reason(self, reason: str) -> str:
        """The finish reason of an output whose sequence ended for `reason`."""
        calls = self._parser.num_calls and self._ends_with_calls
        return "tool_calls" if reason == "stop" and calls else reason

    def message(self, include_reasoning: bool) -> dict[str, Any]:
        """The fields of a message that hold the whole output."""
        text, reasoning = [], []
        calls: list[dict[str, Any]] = []
        for part in self.take():
            match part:
                case Text():
                    text.append(part.text)
                case Reasoning():
                    reasoning.append(part.text)
                case CallBegin():
                    calls.append(self._call(part))
                case CallArguments():
                    calls[part.call]["function"]["arguments"] += part.text
        thought = "".join(reasoning) if reasoning and include_reasoning else None
        return {
            "content": "".join(text) if text or not (calls or reasoning) else None,
            "tool_calls": calls,
            "reasoning": thought,
            "reasoning_content": thought,
        }

    def payloads(self, include_reasoning: bool) -> list[bytes]:
        """The `delta`s of chunks for what wasn't sent yet."""
        deltas: list[dict[str, Any]] = []
        for part in self.take():
            match part:
                case Text():
                    deltas.append({"content": part.text})
                case Reasoning():
                    if include_reasoning:
                        deltas.append({"reasoning": part.text, "reasoning_content": part.text})
                case CallBegin():
                    deltas.append({"tool_calls": [{"index": part.call, **self._call(part)}]})
                case CallArguments():
                    call = {"index": part.call, "function": {"arguments": part.text}}
                    deltas.append({"tool_calls": [call]})
        return [encode_json(delta) for delta in deltas]

    def _call(self, begin: CallBegin) -> dict[str, Any]:
        name = secrets.token_hex(12)
        return {
            "id": name[: self._id_length] if self._id_length else f"call_{name}",
            "type": "function",
            "function": {"name": begin.name, "arguments": ""},
        }
