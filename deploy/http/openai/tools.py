"""The tools of a chat, as OpenAI's API has them."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from deploy.http.body import FreeObject, Strict, refusal
from deploy.http.engine_client import ModelInfo
from deploy.http.generation.tool_use import Function, TextGrammar, ToolUse, text_function
from deploy.http.openai.structured import ResponseFormat
from engine.errors import RequestError

NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,128}$"


class _Tool(Strict):
    """Unknown keys are ignored: clients decorate their tools, and models don't see the keys."""

    model_config = ConfigDict(extra="ignore")


class FunctionDefinition(_Tool):
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an
    object; with `strict` every call follows it."""

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: FreeObject | None = None
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, value: FreeObject | None) -> FreeObject | None:
        if value is not None and value.get("type", "object") != "object":
            raise refusal("parameters must be a JSON schema of type object.")
        return value

    def function(self, namespace: str = "") -> Function:
        """The tool as the model sees it."""
        return Function(self.name, self.description, self.parameters, self.strict, namespace)


class Tool(_Tool):
    """A function."""

    type: Literal["function"]
    function: FunctionDefinition


class Grammar(_Tool):
    """What a text must match."""

    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1)

    def text_grammar(self) -> TextGrammar:
        """The same for the tool."""
        return TextGrammar(self.syntax, self.definition)


class GrammarFormat(_Tool):
    """The input of a custom tool: any text, or one that matches a grammar."""

    type: Literal["text", "grammar"]
    grammar: Grammar | None = None

    @model_validator(mode="after")
    def _check_grammar(self) -> "GrammarFormat":
        if (self.type == "grammar") != (self.grammar is not None):
            raise refusal("grammar is for type grammar, which needs it.", "grammar")
        return self


class CustomDefinition(_Tool):
    """A tool whose input is a text."""

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    format: GrammarFormat | None = None


class CustomTool(_Tool):
    """A tool whose input is a text."""

    type: Literal["custom"]
    custom: CustomDefinition

    def function(self) -> Function:
        """The tool as the model sees it."""
        given = self.custom.format
        grammar = None if given is None else given.grammar
        text_grammar = None if grammar is None else grammar.text_grammar()
        return text_function(self.custom.name, self.custom.description, text_grammar)


class HostedTool(Strict):
    """A tool that other servers run themselves. The model doesn't see it."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(min_length=1, max_length=64)


def kind_of_tool(own: tuple[str, ...]) -> Callable[[Any], str]:
    """Tells which of the kinds `own` a tool is, or that it is hosted."""

    def kind(tool: Any) -> str:
        word = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", own[0])
        return word if word in own or word is None else "hosted"

    return kind


AnyTool = Annotated[
    Annotated[Tool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(kind_of_tool(("function", "custom"))),
]


class Named(Strict):
    """A tool by its name."""

    name: str


class NamedTool(Strict):
    """The function that must be called."""

    type: Literal["function"]
    function: Named


class NamedCustomTool(Strict):
    """The custom tool that must be called."""

    type: Literal["custom"]
    custom: Named


class AllowedTools(Strict):
    """Some of the tools, of which the model may (`auto`) or must (`required`) call one."""

    mode: Literal["auto", "required"]
    tools: list[Annotated[NamedTool | NamedCustomTool, Field(discriminator="type")]] = Field(
        min_length=1
    )


class AllowedToolChoice(Strict):
    """The model may call some of the tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedTool | NamedCustomTool | AllowedToolChoice, Field(discriminator="type")]
)


def tool_use(
    tools: Sequence[AnyTool],
    choice: ToolChoice | None,
    parallel: bool,
    info: ModelInfo,
    hosted: Sequence[str] = (),
) -> ToolUse:
    """What the tools mean. `hosted`: kinds of tools that other fields ask for. Raises
    `RequestError`."""
    functions = []
    for tool in tools:
        match tool:
            case Tool():
                functions.append(tool.function.function())
            case CustomTool():
                functions.append(tool.function())
    not_shown = [*(tool.type for tool in tools if isinstance(tool, HostedTool)), *hosted]
    named, allowed = None, None
    word: Literal["none", "auto", "required"]
    match choice:
        case NamedTool() | NamedCustomTool():
            word, named = "required", _name(choice)
        case AllowedToolChoice():
            word = choice.allowed_tools.mode
            allowed = [_name(tool) for tool in choice.allowed_tools.tools]
        case _:
            word = choice or "auto"
    return ToolUse(
        functions, word, info, named=named, allowed=allowed, parallel=parallel, hosted=not_shown
    )


def _name(choice: NamedTool | NamedCustomTool) -> str:
    return choice.function.name if isinstance(choice, NamedTool) else choice.custom.name


def schema_of_answer(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """The JSON schema of an answer that may come instead of calls. Raises `RequestError`."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is not None:
        return response_format.json_schema.schema_
    if response_format.type == "json_object":
        return {"type": "object"}
    raise RequestError("response_format structural_tag and tools exclude each other.", "tools")
