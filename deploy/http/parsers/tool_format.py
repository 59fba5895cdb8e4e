"""`ToolFormat`: how a family of models writes tool calls, to read them and to demand them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deploy.http.parsers import deepseek, harmony
from deploy.http.parsers.deepseek import DeepSeekParser
from deploy.http.parsers.granite import GraniteParser
from deploy.http.parsers.harmony import HarmonyParser
from deploy.http.parsers.hermes import HermesParser
from deploy.http.parsers.llama3 import Llama3Parser
from deploy.http.parsers.mistral import MistralParser
from deploy.http.parsers.pythonic import Llama4Parser, PythonicParser
from deploy.http.parsers.tool_parser import ToolParser
from deploy.http.parsers.xml_calls import (
    Glm45Parser,
    MiniMaxM2Parser,
    Qwen3CoderParser,
    XmlForm,
)
from engine.constraints import ConstraintSpec, structured
from engine.constraints.grammar_payload import TaggedStructure, ToolCalls
from engine.registry import Registry


class TextInput(NamedTuple):
    """Arguments that are one string, whose text follows a grammar. `field`: its name."""

    field: str
    lark: str


class ToolFormat(NamedTuple):
    """`begin` is what a call has before its arguments, with `NAME` for the name as JSON and `WORD`
    for the name as it is. The other fields are those of `ToolCalls`."""

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
    signs: Sequence[Sequence[str]] = ()
    """What the chat templates of such models show: all texts of one of these."""
    xml: XmlForm | None = None
    """The arguments stand between tags, where these can hold their schema."""
    reasoning: str = ""
    """A word of `REASONING_FORMATS` that reads thoughts and calls together."""

    def constraint(
        self,
        tools: Mapping[str, Mapping[str, Any] | TextInput | None],
        *,
        may_answer: bool,
        parallel: bool,
        answer: dict[str, Any] | None = None,
    ) -> ConstraintSpec:
        """The output is calls of `tools`: by name the schema of the arguments, or what a text must
        be, or None if they are free. With `may_answer` it may be, or hold, text, or JSON after the
        schema `answer`. Raises `RequestError` if there are too many tools."""
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

    def _call(self, name: str, arguments: Mapping[str, Any] | TextInput | None) -> TaggedStructure:
        begin = self.begin.replace("NAME", json.dumps(name)).replace("WORD", name)
        if isinstance(arguments, TextInput):
            begin += f'{{"{arguments.field}": "'
            return TaggedStructure(begin, {}, '"}' + self.end, arguments.lark)
        if self.xml is not None and (tagged := self.xml.structure(name, arguments)):
            return tagged
        return TaggedStructure(begin, dict(arguments or {"type": "object"}), self.end)


_ARGUMENTS = '{"name": NAME, "arguments": '
MINIMAX_M2 = ToolFormat(
    MiniMaxM2Parser,
    begin=_ARGUMENTS,
    end="}\n",
    opening="\n",
    separator="",
    closing="</minimax:tool_call>",
    words=("<minimax:tool_call>", "</minimax:tool_call>"),
    signs=(("<minimax:tool_call>",),),
    xml=MiniMaxM2Parser.form,
)
QWEN3_CODER = ToolFormat(
    Qwen3CoderParser,
    begin=_ARGUMENTS,
    end="}\n",
    opening="\n",
    closing="</tool_call>",
    between="\n",
    words=("<tool_call>", "</tool_call>"),
    signs=(("<tool_call>", "<function="),),
    xml=Qwen3CoderParser.form,
)
GLM45 = ToolFormat(
    Glm45Parser,
    begin=_ARGUMENTS,
    end="}</tool_call>",
    between="\n",
    words=("<tool_call>", "</tool_call>"),
    signs=(("<tool_call>", "<arg_key>"),),
    xml=Glm45Parser.form,
)
GRANITE = ToolFormat(
    GraniteParser,
    begin=_ARGUMENTS,
    opening="[",
    separator=", ",
    closing="]",
    words=("<|tool_call|>",),
    signs=(("<|tool_call|>",),),
)
HERMES = ToolFormat(
    HermesParser,
    begin=_ARGUMENTS,
    opening="\n",
    closing="\n</tool_call>",
    between="\n",
    words=("<tool_call>", "</tool_call>"),
    signs=(("<tool_call>",),),
)
MISTRAL = ToolFormat(
    MistralParser,
    begin=_ARGUMENTS,
    opening="[",
    separator=", ",
    closing="]",
    words=("[TOOL_CALLS]",),
    id_length=9,
    signs=(("[TOOL_CALLS]",),),
)
_DEEPSEEK_MARKS = (
    DeepSeekParser.marker,
    DeepSeekParser.closing,
    deepseek.CALL,
    deepseek.CALL_END,
    deepseek.SEPARATOR,
)
DEEPSEEK_V3 = ToolFormat(
    DeepSeekParser,
    begin=f"{deepseek.CALL}{deepseek.KIND}{deepseek.SEPARATOR}WORD\n{deepseek.FENCED}\n",
    end=f"\n{deepseek.FENCE}{deepseek.CALL_END}",
    separator="\n",
    closing=DeepSeekParser.closing,
    words=_DEEPSEEK_MARKS,
    signs=((DeepSeekParser.marker, deepseek.FENCED),),
)
DEEPSEEK_V31 = ToolFormat(
    DeepSeekParser,
    begin=f"{deepseek.CALL}WORD{deepseek.SEPARATOR}",
    end=deepseek.CALL_END,
    separator="",
    closing=DeepSeekParser.closing,
    words=_DEEPSEEK_MARKS,
    signs=((DeepSeekParser.marker,),),
)
GPT_OSS = ToolFormat(
    HarmonyParser,
    begin=f"{harmony.CHANNEL}commentary to={harmony.NAMESPACE}WORD {harmony.CONSTRAIN}json"
    f"{harmony.MESSAGE}",
    end="",
    words=(harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE),
    marks_answers=False,
    signs=((harmony.CHANNEL,),),
    reasoning="gpt_oss",
)
"""One call ends the output: `<|call|>` is an end-of-sequence token."""
_PARAMETERS = '{"name": NAME, "parameters": '
LLAMA3 = ToolFormat(
    Llama3Parser,
    begin=_PARAMETERS,
    separator="; ",
    marks_answers=False,
    # Llama 3.2's template shows the form, but not the token.
    signs=(("<|python_tag|>",), ('"parameters": ',)),
)
LLAMA4_PYTHONIC = ToolFormat(
    Llama4Parser,
    begin=_PARAMETERS,
    separator="; ",
    marks_answers=False,
    signs=(("<|python_start|>",),),
)
PYTHONIC = ToolFormat(
    PythonicParser,
    begin=_PARAMETERS,
    separator="; ",
    marks_answers=False,
    signs=(("```tool_code",), ("[func_name1(",)),
)
TOOL_FORMATS: Registry[ToolFormat] = Registry(
    "tool_call_parser",
    {
        "minimax_m2": MINIMAX_M2,
        "qwen3_coder": QWEN3_CODER,
        "glm45": GLM45,
        "granite": GRANITE,
        "hermes": HERMES,
        "mistral": MISTRAL,
        "deepseek_v3": DEEPSEEK_V3,
        "deepseek_v31": DEEPSEEK_V31,
        "gpt_oss": GPT_OSS,
        "llama4_pythonic": LLAMA4_PYTHONIC,
        "pythonic": PYTHONIC,
        "llama3_json": LLAMA3,
        # Further names that vLLM and SGLang have for them.
        "openai": GPT_OSS,
        "qwen3_xml": QWEN3_CODER,
        "glm47": GLM45,
        "granite4": HERMES,
        "qwen25": HERMES,
        "qwen": HERMES,
        "llama3": LLAMA3,
        "llama4_json": LLAMA4_PYTHONIC,
        "deepseekv3": DEEPSEEK_V3,
        "deepseekv31": DEEPSEEK_V31,
    },
)
"""Where several have their signs in a template, the first one counts."""
