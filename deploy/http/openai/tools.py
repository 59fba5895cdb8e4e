"""The tools of a chat, as OpenAI's API has them."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from deploy.http.body import FreeObject, Strict, refusal
from deploy.http.engine_client import ModelInfo
from deploy.http.generation.tool_use import Function, ToolUse
from deploy.http.openai.structured import ResponseFormat
from engine.errors import RequestError

NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,128}$"


class FunctionDefinition(Strict):
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


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    """A function by its name."""

    name: str


class NamedTool(Strict):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    """Some of the tools, of which the model may (`auto`) or must (`required`) call one."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedToolChoice(Strict):
    """The model may call some of the tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedTool | AllowedToolChoice, Field(discriminator="type")]
)


def tool_use(
    tools: list[Tool], choice: ToolChoice | None, parallel: bool, info: ModelInfo
) -> ToolUse:
    """What the tools mean. Raises `RequestError`."""
    functions = [Function(**tool.function.model_dump()) for tool in tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        return ToolUse(functions, "required", info, named=name, parallel=parallel)
    if isinstance(choice, AllowedToolChoice):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        return ToolUse(
            functions, choice.allowed_tools.mode, info, allowed=allowed, parallel=parallel
        )
    return ToolUse(functions, choice or "auto", info, parallel=parallel)


def schema_of_answer(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """The JSON schema of an answer that may come instead of calls. Raises `RequestError`."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is not None:
        return response_format.json_schema.schema_
    if response_format.type == "json_object":
        return {"type": "object"}
    raise RequestError("response_format structural_tag and tools exclude each other.", "tools")
