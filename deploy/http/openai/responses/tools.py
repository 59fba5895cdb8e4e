"""The tools of a response: functions, tools that take a text, and groups of both."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from deploy.http.body import Strict, refusal, type_of
from deploy.http.generation.tool_use import Function, TextGrammar, full_name, text_function
from deploy.http.openai.tools import (
    NAME_PATTERN,
    CustomDefinition,
    FunctionDefinition,
    HostedTool,
    kind_of_tool,
)


class FunctionTool(FunctionDefinition):
    """A function that the model may call. `strict` is false if it is left out. All tools are shown
    from the start, those of `defer_loading` too."""

    type: Literal["function"]

    def functions(self, namespace: str = "") -> list[Function]:
        """The tools as the model sees them."""
        return [self.function(namespace)]


class CustomFormat(Strict):
    """The input of a custom tool: any text, or one that matches a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _check_grammar(self) -> "CustomFormat":
        for name in ("syntax", "definition"):
            if (self.type == "grammar") != (getattr(self, name) is not None):
                raise refusal(f"{name} is for type grammar, which needs it.", name)
        return self


class CustomTool(CustomDefinition):
    """A tool whose input is a text."""

    type: Literal["custom"]
    format: CustomFormat | None = None

    def functions(self, namespace: str = "") -> list[Function]:
        """The tools as the model sees them."""
        given, grammar = self.format, None
        if given is not None and given.syntax is not None and given.definition is not None:
            grammar = TextGrammar(given.syntax, given.definition)
        return [text_function(self.name, self.description, grammar, namespace)]


OwnTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(Strict):
    """A group of tools. The model sees each by the name `group__tool`."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["namespace"]
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    tools: list[OwnTool]

    def functions(self, namespace: str = "") -> list[Function]:
        """The tools as the model sees them."""
        return [function for tool in self.tools for function in tool.functions(self.name)]


class OtherTool(HostedTool):
    """A tool that other servers run themselves. The model doesn't see it."""

    def functions(self, namespace: str = "") -> list[Function]:
        """There are none."""
        return []


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("hosted")],
    Discriminator(kind_of_tool(("function", "custom", "namespace"))),
]


class NamedTool(Strict):
    """A tool by its name."""

    type: Literal["function", "custom"]
    name: str
    namespace: str = ""

    @property
    def full_name(self) -> str:
        """The name that the model reads and writes."""
        return full_name(self.name, self.namespace)


class AllowedChoice(Strict):
    """Some of the tools, of which the model may (`auto`) or must (`required`) call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


def _kind_of_choice(choice: Any) -> str:
    return "allowed" if type_of(choice) == "allowed_tools" else "named"


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedTool, Tag("named")] | Annotated[AllowedChoice, Tag("allowed")],
        Discriminator(_kind_of_choice),
    ]
)
