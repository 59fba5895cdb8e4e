"""How outputs are read: as text, or as reasoning, tool calls and text."""

from __future__ import annotations

from collections.abc import Callable

from deploy.http.generation.tool_use import TEXT_FIELD, Function, ToolUse
from deploy.http.parsers.json_reader import TextFieldReader
from deploy.http.parsers.output_parser import OutputParser
from deploy.http.parsers.parts import CallArguments, CallBegin, Part
from deploy.http.parsers.reasoning_format import ReasoningFormat
from deploy.http.parsers.reasoning_parser import ReasoningParser
from deploy.http.parsers.tool_parser import ToolParser
from engine.constraints.grammar_payload import Thinking


class OutputReading:
    """What the outputs of one request are read for."""

    def __init__(
        self, tools: ToolUse, thinking: Thinking | None, form: ReasoningFormat | None
    ) -> None:
        """`thinking`: how outputs begin to reason; None if they don't. `form`: the model's."""
        self._tools = tools
        self._thinking = thinking
        self._form = form

    def read(self, new_id: Callable[[int], str]) -> OutputState:
        """The state of a new output; `new_id` names each of its calls."""
        tools, thinking, form = self._tools, self._thinking, self._form
        if form is not None and form.read is not None:
            reader = form.read({} if tools.format is None else tools.schemas, thinking)
            return OutputState(self._parser(None, reader), tools, new_id)
        reasoning = None if thinking is None else ReasoningParser(thinking)
        if tools.format is None:
            return OutputState(OutputParser(reasoning, None), tools, new_id)
        parser = self._parser(reasoning, tools.format.parser(tools.schemas))
        return OutputState(parser, tools, new_id)

    def _parser(self, reasoning: ReasoningParser | None, calls: ToolParser) -> OutputParser:
        tools = self._tools
        return OutputParser(reasoning, calls, tools.max_calls, may_answer=not tools.must_call)


class OutputState:
    """The parts of one output so far."""

    def __init__(self, parser: OutputParser, tools: ToolUse, new_id: Callable[[int], str]) -> None:
        self._parser = parser
        self._new_id = new_id
        self._tools = tools
        self._new: list[Part] = []
        self._text_input: TextFieldReader | None = None
        """Reads the arguments of the last call, if its tool takes a text."""
        self._ids: list[str] = []
        self._names: list[str] = []
        """Of the functions that are called."""
        self.num_reasoning = 0
        """Tokens of reasoning."""

    @property
    def is_named(self) -> bool:
        """Whether the request named the function to call."""
        return self._tools.is_named

    @property
    def is_cut(self) -> bool:
        """Whether the output ended within a call: it isn't to be run."""
        return self._parser.is_cut

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
        self._keep(self._parser.feed(text))
        if was_reasoning and self._parser.has_reasoned:
            self.num_reasoning = num_output
        if has_ended:
            self._keep(self._parser.finish())
            self._end_text_input()

    def take(self) -> list[Part]:
        """The parts that weren't taken yet."""
        parts, self._new = self._new, []
        return parts

    def function(self, call: int) -> Function:
        """The tool that a call, which has begun, is of."""
        name = self._names[call]
        return self._tools.function(name) or Function(name)

    def takes_text(self, call: int) -> bool:
        """Whether the arguments of a call are a text, and no object."""
        return self.function(call).takes_text

    def call_id(self, begin: CallBegin) -> str:
        """The id of a call, the same every time."""
        length = 0 if self._tools.format is None else self._tools.format.id_length
        while len(self._ids) <= begin.call:
            name = self._new_id(len(self._ids))
            self._ids.append(name[:length] if length else f"call_{name}")
        return self._ids[begin.call]

    def _keep(self, parts: list[Part]) -> None:
        for part in parts:
            match part:
                case CallBegin():
                    self._end_text_input()
                    self._names.append(part.name)
                    if self.takes_text(part.call):
                        self._text_input = TextFieldReader(TEXT_FIELD)
                    self._new.append(part)
                case CallArguments() if self._text_input is not None:
                    self._new.append(part._replace(text=self._text_input.feed(part.text)))
                case _:
                    self._new.append(part)

    def _end_text_input(self) -> None:
        if self._text_input is not None:
            self._new.append(CallArguments(len(self._names) - 1, self._text_input.finish()))
            self._text_input = None
