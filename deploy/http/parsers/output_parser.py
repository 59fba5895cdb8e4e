"""`OutputParser`: the parts of one output, from reasoning to tool calls."""

from __future__ import annotations

from deploy.http.parsers.parts import CallArguments, CallBegin, Part, Text, joined
from deploy.http.parsers.reasoning_parser import ReasoningParser
from deploy.http.parsers.tool_parser import ToolParser


class OutputParser:
    """Reads one output; the same parts however its text is cut, but for where they are cut."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        max_calls: int | None = None,
        may_answer: bool = True,
    ) -> None:
        """`tools` also reads the thoughts where these alternate with calls; then there is no
        `reasoning`. `max_calls`: further calls are dropped. `may_answer` False: the output is calls
        alone, so that text is a part of a call that was cut off; it is dropped."""
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._may_answer = may_answer
        self.num_calls = 0
        self.has_reasoned = False
        """Whether the output begins with reasoning, as far as is known."""
        self.is_within_reasoning = False
        """Whether the output so far ends within the reasoning."""

    @property
    def is_cut(self) -> bool:
        """Whether the output so far ends within a call."""
        return self._tools is not None and self._tools.is_cut

    @property
    def is_reasoning(self) -> bool:
        """Whether the model may still be thinking."""
        if self._reasoning is not None:
            return not self._reasoning.is_closed
        return self._tools is not None and self._tools.is_reasoning

    def feed(self, text: str) -> list[Part]:
        """The parts that are known now that `text` has come."""
        parts: list[Part] = []
        if self._reasoning is not None:
            parts += self._reasoning.feed(text)
            self.has_reasoned = self._reasoning.has_begun
            self.is_within_reasoning = self._reasoning.is_within
            if not self._reasoning.is_done:
                return parts
            text, self._reasoning = self._reasoning.rest, None
        return parts + self._answer(text)

    def finish(self) -> list[Part]:
        """The parts that are left when the output has ended."""
        parts: list[Part] = []
        if self._reasoning is not None:
            parts += self._reasoning.finish()
            rest, self._reasoning = self._reasoning.rest, None
            parts += self._answer(rest)
        if self._tools is not None:
            parts += self._allowed(self._tools.finish())
            self._see_thoughts(self._tools)
        return joined(parts)

    def _answer(self, text: str) -> list[Part]:
        if self._tools is None:
            return [Text(text)] if text else []
        parts = self._allowed(self._tools.feed(text))
        self._see_thoughts(self._tools)
        return parts

    def _see_thoughts(self, tools: ToolParser) -> None:
        if tools.has_reasoned:
            self.has_reasoned, self.is_within_reasoning = True, tools.is_within_reasoning

    def _allowed(self, parts: list[Part]) -> list[Part]:
        """Without the calls beyond `max_calls`, and without text if there can't be any."""
        result = []
        for part in parts:
            if isinstance(part, CallBegin | CallArguments):
                if self._max_calls is not None and part.call >= self._max_calls:
                    continue
                self.num_calls = part.call + 1
            elif isinstance(part, Text) and not self._may_answer:
                continue
            result.append(part)
        return result
