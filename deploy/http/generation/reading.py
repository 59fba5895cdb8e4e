"""How outputs are read: as text, or as reasoning, tool calls and text."""

from __future__ import annotations

import secrets

from deploy.http.generation.tool_use import ToolUse
from deploy.http.parsers.output_parser import OutputParser
from deploy.http.parsers.parts import CallBegin, Part
from deploy.http.parsers.reasoning_parser import ReasoningParser
from engine.constraints.grammar_payload import Thinking


class OutputReading:
    """What the outputs of one request are read for."""

    def __init__(self, tools: ToolUse, thinking: Thinking | None) -> None:
        """`thinking`: how outputs begin to reason; None if they don't."""
        self._tools = tools
        self._thinking = thinking

    def read(self) -> OutputState:
        """The state of a new output."""
        tools, thinking = self._tools, self._thinking
        reasoning = None if thinking is None else ReasoningParser(thinking.is_open)
        if tools.format is None:
            return OutputState(OutputParser(reasoning, None), 0, False)
        parser = OutputParser(
            reasoning,
            tools.format.parser(tools.names),
            tools.max_calls,
            may_answer=not tools.must_call,
        )
        return OutputState(parser, tools.format.id_length, tools.is_named)


class OutputState:
    """The parts of one output so far."""

    def __init__(self, parser: OutputParser, id_length: int, is_named: bool) -> None:
        """`id_length`: see `ToolFormat`. `is_named`: the request named the function to call."""
        self._parser = parser
        self._id_length = id_length
        self.is_named = is_named
        self._new: list[Part] = []
        self._ids: list[str] = []
        self.num_reasoning = 0
        """Tokens of reasoning."""

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return self._parser.num_calls

    @property
    def is_within_reasoning(self) -> bool:
        """Whether the output so far ends within its reasoning."""
        return self._parser.is_within_reasoning

    def add(self, text: str, num_output: int, has_ended: bool) -> None:
        """More of the output: `num_output` tokens in all so far."""
        was_reasoning = self._parser.is_reasoning
        self._new += self._parser.feed(text)
        if was_reasoning and self._parser.has_reasoned:
            self.num_reasoning = num_output
        if has_ended:
            self._new += self._parser.finish()

    def take(self) -> list[Part]:
        """The parts that weren't taken yet."""
        parts, self._new = self._new, []
        return parts

    def call_id(self, begin: CallBegin) -> str:
        """The id of a call, the same every time."""
        while len(self._ids) <= begin.call:
            name = secrets.token_hex(12)
            self._ids.append(name[: self._id_length] if self._id_length else f"call_{name}")
        return self._ids[begin.call]
