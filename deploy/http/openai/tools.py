"""The tools of a chat: which functions the model may call, and whether it must."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from typing import Any, Literal

from pydantic import Field, field_validator

from deploy.http.engine_client import ModelInfo
from deploy.http.openai.strict import FreeObject, Strict, refusal
from deploy.http.openai.structured import ResponseFormat
from deploy.http.parsers.tool_format import TOOL_FORMATS, ToolFormat
from engine.constraints import ConstraintSpec
from engine.errors import RequestError

NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,128}$"
MAX_TOOLS = 128


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

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The schema that bound arguments follow."""
        return {"type": "object", **(self.parameters or {})}


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


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolUse:
    """What the tools of a request mean for its prompt and its output.

    Raises `RequestError` if they don't fit together, or the model has no tool format.
    """

    def __init__(
        self, tools: list[Tool], choice: ToolChoice | None, parallel: bool, info: ModelInfo
    ) -> None:
        self._functions = {tool.function.name: tool.function for tool in tools}
        self._parallel = parallel
        if len(self._functions) < len(tools):
            raise RequestError("Two tools have the same name.", "tools")
        if len(tools) > MAX_TOOLS:
            raise RequestError(f"{len(tools)} tools: at most {MAX_TOOLS} are allowed.", "tools")
        self.must_call = choice == "required" or isinstance(choice, NamedTool)
        if self.must_call and not tools:
            raise RequestError("tool_choice needs tools.", "tool_choice")
        self.is_named = isinstance(choice, NamedTool)
        if isinstance(choice, NamedTool) and choice.function.name not in self._functions:
            raise RequestError(
                f"tool_choice names {choice.function.name[:200]!r}, which is not one of the tools.",
                "tool_choice",
            )
        self._callable = self._functions
        if isinstance(choice, NamedTool):
            self._callable = {choice.function.name: self._functions[choice.function.name]}
        self.format: ToolFormat | None = None
        """How calls are written; None if the model can't call here."""
        if tools and choice != "none":
            if not info.tool_format:
                raise RequestError(
                    "This model's chat template has no form of tool calls that the server knows. "
                    "Set tool_call_parser in its configuration, or send tool_choice: none.",
                    "tools",
                )
            self.format = TOOL_FORMATS[info.tool_format]
        self.for_template: list[dict[str, Any]] | None = None
        """The tools as chat templates read them."""
        if tools:
            hidden = {"function": {"strict"}}  # the API's word, not the model's
            self.for_template = [
                tool.model_dump(exclude_none=True, exclude=hidden) for tool in tools
            ]

    @property
    def names(self) -> frozenset[str]:
        """The functions that may be called."""
        return frozenset(self._callable)

    @property
    def max_calls(self) -> int | None:
        """How many calls a reply may have; None: any number."""
        return None if self._parallel and not self.is_named else 1

    def constraint(self, response_format: ResponseFormat | None) -> ConstraintSpec | None:
        """What keeps the output to calls where they are demanded, and to schemas where they are
        strict. `response_format` is for an answer instead of calls. Raises `RequestError`."""
        if self.format is None:
            return None
        answer = _schema_of_answer(response_format)
        if answer is not None and self.must_call:
            answer = None  # there will be no answer
        if not (self.must_call or answer is not None or self._any_strict):
            return None
        bound = self.must_call or answer is not None
        schemas = {
            name: function.schema_of_arguments if bound or function.strict else {"type": "object"}
            for name, function in self._callable.items()
        }
        return self.format.constraint(
            schemas,
            may_answer=not self.must_call,
            parallel=self.max_calls is None,
            answer=answer,
        )

    @property
    def _any_strict(self) -> bool:
        return any(function.strict for function in self._functions.values())


def _schema_of_answer(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is not None:
        return response_format.json_schema.schema_
    if response_format.type == "json_object":
        return {"type": "object"}
    raise RequestError("response_format structural_tag and tools exclude each other.", "tools")
