"""`ToolFormat`: how a family of models writes tool calls, to read them and to demand them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deploy.http.parsers.hermes import HermesParser
from deploy.http.parsers.llama3 import Llama3Parser
from deploy.http.parsers.mistral import MistralParser
from deploy.http.parsers.tool_parser import ToolParser
from engine.constraints import ConstraintSpec, structured
from engine.constraints.grammar_payload import TaggedStructure, ToolCalls
from engine.registry import Registry


class TextInput(NamedTuple):
    """Arguments that are one string, whose text follows a grammar. `field`: its name."""

    field: str
    lark: str


class ToolFormat(NamedTuple):
    """`begin` is what a call has before its arguments, with `NAME` for the name as JSON. The other
    fields are those of `ToolCalls`."""

    parser: type[ToolParser]
    begin: str
    end: str = "}"
    opening: str = ""
    separator: str | None = None
    closing: str = ""
    between: str | None = None
    words: Sequence[str] = ()
    marks_answers: bool = True
    """A call that the model chooses to write begins with the parser's marker."""
    id_length: int = 0
    """Characters of a call's id if templates demand a length; 0: `call_` and 24 characters."""

    def constraint(
        self,
        tools: Mapping[str, Mapping[str, Any] | TextInput],
        *,
        may_answer: bool,
        parallel: bool,
        answer: dict[str, Any] | None = None,
    ) -> ConstraintSpec:
        """The output is calls of `tools`: by name the schema of the arguments, or what a text must
        be. With `may_answer` it may be, or hold, text, or JSON after the schema `answer`. Raises
        `RequestError` if there are too many tools."""
        marked = self.marks_answers
        calls = [self._call(name, arguments) for name, arguments in tools.items()]
        return structured.tool_calls(
            ToolCalls(
                calls,
                self.parser.marker if marked else "",
                self.opening,
                self.separator,
                self.closing,
                self.between,
                list(self.words),
                may_answer,
                parallel,
                answer,
            )
        )

    def _call(self, name: str, arguments: Mapping[str, Any] | TextInput) -> TaggedStructure:
        begin = self.begin.replace("NAME", json.dumps(name))
        if isinstance(arguments, TextInput):
            begin += f'{{"{arguments.field}": "'
            return TaggedStructure(begin, {}, '"}' + self.end, arguments.lark)
        return TaggedStructure(begin, dict(arguments), self.end)


HERMES = ToolFormat(
    HermesParser,
    begin='{"name": NAME, "arguments": ',
    opening="\n",
    closing="\n</tool_call>",
    between="\n",
    words=("<tool_call>", "</tool_call>"),
)
LLAMA3 = ToolFormat(
    Llama3Parser, begin='{"name": NAME, "parameters": ', separator="; ", marks_answers=False
)
MISTRAL = ToolFormat(
    MistralParser,
    begin='{"name": NAME, "arguments": ',
    opening="[",
    separator=", ",
    closing="]",
    words=("[TOOL_CALLS]",),
    id_length=9,
)
TOOL_FORMATS: Registry[ToolFormat] = Registry(
    "tool_call_parser", {"hermes": HERMES, "llama3_json": LLAMA3, "mistral": MISTRAL}
)
