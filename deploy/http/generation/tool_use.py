"""`ToolUse`: which tools an output may call, and whether it must."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from deploy.http.engine_client import ModelInfo
from deploy.http.parsers.tool_format import TOOL_FORMATS, TextInput, ToolFormat
from engine.constraints import ConstraintSpec
from engine.errors import RequestError

MAX_TOOLS = 128
TEXT_FIELD = "input"


class Function(NamedTuple):
    """A tool. `parameters` is the JSON schema of its arguments; with `strict` every call follows
    it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    namespace: str = ""
    """The group that the tool belongs to."""
    takes_text: bool = False
    """Its input is a text. The model writes it as the string `TEXT_FIELD` of its arguments."""
    lark: str = ""
    """A grammar of that text."""

    @property
    def full_name(self) -> str:
        """The name that the model reads and writes."""
        return full_name(self.name, self.namespace)

    @property
    def bound_arguments(self) -> dict[str, Any] | TextInput:
        """What bound arguments follow."""
        if self.lark:
            return TextInput(TEXT_FIELD, self.lark)
        return {"type": "object", **(self.parameters or {})}

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function: dict[str, Any] = {"name": self.full_name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


class TextGrammar(NamedTuple):
    """What the input of a tool must match. `syntax`: `regex` or `lark`."""

    syntax: str
    definition: str


def text_function(
    name: str, description: str | None, text_grammar: TextGrammar | None, namespace: str = ""
) -> Function:
    """A tool whose input is a text, which follows its grammar in every call."""
    field: dict[str, Any] = {"type": "string"}
    lark = ""
    if text_grammar is not None:
        syntax, definition = text_grammar
        said = f"The input must match this {syntax} grammar:\n{definition}"
        description = f"{description}\n\n{said}" if description else said
        if syntax == "regex":
            field["pattern"] = f"^(?:{definition})$"
        else:
            lark = definition
    parameters = {
        "type": "object",
        "properties": {TEXT_FIELD: field},
        "required": [TEXT_FIELD],
        "additionalProperties": False,
    }
    strict = text_grammar is not None
    return Function(name, description, parameters, strict, namespace, takes_text=True, lark=lark)


def called_with_text(name: str, text: str) -> dict[str, Any]:
    """A call of a tool that takes a text, as chat templates read it."""
    return {"name": name, "arguments": {TEXT_FIELD: text}}


def full_name(name: str, namespace: str) -> str:
    """The name of a tool of a group, as the model reads and writes it."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


class ToolUse:
    """What the tools of a request mean for its prompt and its output.

    Raises `RequestError` if they don't fit together, or the model has no tool format.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        choice: Literal["none", "auto", "required"],
        info: ModelInfo,
        *,
        named: str | None = None,
        allowed: Collection[str] | None = None,
        parallel: bool = True,
        hosted: Sequence[str] = (),
    ) -> None:
        """`named`: the function that must be called. `allowed`: the functions that may be; None for
        all. Both have full names. `parallel`: there may be several calls. `hosted`: kinds of tools
        that run in other servers; the model doesn't see them."""
        self.ignored = list(dict.fromkeys(hosted))
        """Kinds of tools that the model doesn't see."""
        self._functions = {function.full_name: function for function in functions}
        self._parallel = parallel
        if len(self._functions) < len(functions):
            raise RequestError("Two tools have the same name.", "tools")
        if len(functions) > MAX_TOOLS:
            raise RequestError(f"{len(functions)} tools: at most {MAX_TOOLS} are allowed.", "tools")
        self.must_call = choice == "required" or named is not None
        if self.must_call and not functions:
            raise RequestError("tool_choice needs tools.", "tool_choice")
        self.is_named = named is not None
        for name in (allowed or ()) if named is None else (named,):
            if name not in self._functions:
                raise RequestError(
                    f"tool_choice names {name[:200]!r}, which is not one of the tools.",
                    "tool_choice",
                )
        if named is not None:
            allowed = [named]
        names = self._functions if allowed is None else allowed
        self._callable = {name: self._functions[name] for name in names}
        self.format: ToolFormat | None = None
        """How calls are written; None if there can be none."""
        if functions and choice != "none":
            if not info.tool_format:
                raise RequestError(
                    "This model's chat template has no form of tool calls that the server knows. "
                    "Set tool_call_parser in its configuration, or send tool_choice: none.",
                    "tools",
                )
            self.format = TOOL_FORMATS[info.tool_format]
        self.for_template = [function.for_template() for function in functions] or None
        """The tools as chat templates read them."""

    def function(self, name: str) -> Function | None:
        """The tool with this full name; None if the model made it up."""
        return self._functions.get(name)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The functions that may be called: the JSON schemas of their arguments by full name."""
        return {name: function.parameters or {} for name, function in self._callable.items()}

    @property
    def max_calls(self) -> int | None:
        """How many calls an output may have; None: any number."""
        return None if self._parallel and not self.is_named else 1

    def constraint(self, answer: dict[str, Any] | None) -> ConstraintSpec | None:
        """What keeps the output to calls where they are demanded, and to schemas where they are
        strict. `answer`: JSON schema of an answer instead of calls. Raises `RequestError`."""
        if self.format is None:
            return None
        if self.must_call:
            answer = None  # there will be no answer
        bound = self.must_call or answer is not None
        is_free = len(self._callable) == len(self._functions)
        if is_free and not bound and not any(tool.strict for tool in self._functions.values()):
            return None
        schemas: dict[str, dict[str, Any] | TextInput | None] = {
            name: function.bound_arguments if bound or function.strict else None
            for name, function in self._callable.items()
        }
        return self.format.constraint(
            schemas,
            may_answer=not self.must_call,
            parallel=self.max_calls is None,
            answer=answer,
        )
