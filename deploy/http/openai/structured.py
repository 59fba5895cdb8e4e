"""Structured output: the fields of a request that say what the output must be.

OpenAI's `response_format`, vLLM's `structured_outputs` and the `guided_*` names that it had before.
A request may use one of them. All become a `ConstraintSpec`.
"""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from deploy.http.body import Strict, refusal
from deploy.http.generation.request import named_error
from engine.constraints import ConstraintSpec, structured
from engine.errors import RequestError


class JsonSchemaFormat(Strict):
    """OpenAI's `json_schema`. The output follows the schema whether `strict` or not."""

    name: str = Field(min_length=1, max_length=256)
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class TaggedStructure(Strict):
    """JSON that follows `schema` between two texts."""

    begin: str = Field(min_length=1)
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    end: str = ""


class ResponseFormat(Strict):
    """What the output must be, by `type`."""

    unsupported: ClassVar = {"format": ()}

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[TaggedStructure] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _check_parts(self) -> "ResponseFormat":
        parts = {
            "json_schema": ("json_schema",),
            "structural_tag": ("structures", "triggers"),
        }
        wanted = parts.get(self.type, ())
        for name in ("json_schema", "structures", "triggers"):
            given = getattr(self, name) is not None
            if given and name not in wanted:
                raise refusal(f"{name} doesn't belong to type {self.type}.", name)
            if name in wanted and not given:
                raise refusal(f"type {self.type} needs {name}.", name)
        return self


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one of the first six fields."""

    unsupported: ClassVar = {"disable_additional_properties": (False,)}

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputs":
        given = self._kinds()
        if len(given) != 1:
            found = f", not {' and '.join(given)}" if given else ""
            raise refusal(f"structured_outputs takes one of {', '.join(_KINDS)}{found}.")
        has_space = self.disable_any_whitespace or self.whitespace_pattern is not None
        if has_space and given[0] in ("regex", "choice", "grammar"):
            raise refusal(f"The whitespace options are for JSON, not for {given[0]}.")
        return self

    def kind(self) -> str:
        """The field that is given."""
        return self._kinds()[0]

    def _kinds(self) -> list[str]:
        """Those that are given; `json_object: false` is as good as none."""
        values = {name: getattr(self, "json_" if name == "json" else name) for name in _KINDS}
        return [name for name, value in values.items() if value is not None and value is not False]


def constraint_field(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    guided_json: str | dict[str, Any] | None = None,
    guided_regex: str | None = None,
    guided_choice: list[str] | None = None,
    guided_grammar: str | None = None,
) -> str:
    """The field that constrains the output, as errors name it; "" if none does.

    Raises `RequestError` if several do.
    """
    fields = {
        "guided_json": guided_json,
        "guided_regex": guided_regex,
        "guided_choice": guided_choice,
        "guided_grammar": guided_grammar,
    }
    given = [name for name, value in fields.items() if value is not None]
    if structured_outputs is not None:
        given.insert(0, f"structured_outputs.{structured_outputs.kind()}")
    if response_format is not None and response_format.type != "text":
        schema = response_format.type == "json_schema"
        given.insert(0, "response_format.json_schema.schema" if schema else "response_format")
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} exclude each other.", given[1])
    return given[0] if given else ""


def constraint_spec(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    guided_json: str | dict[str, Any] | None = None,
    guided_regex: str | None = None,
    guided_choice: list[str] | None = None,
    guided_grammar: str | None = None,
) -> ConstraintSpec | None:
    """The constraint of a request, None if it has none. Whether a grammar compiles is to be checked
    by `check_constraint`.

    Raises `RequestError`, which names the field.
    """
    given = (guided_json, guided_regex, guided_choice, guided_grammar)
    field = constraint_field(response_format, structured_outputs, *given)
    try:
        if field.startswith("response_format"):
            assert response_format is not None
            return _from_response_format(response_format)
        if field.startswith("structured_outputs"):
            assert structured_outputs is not None
            return _from_structured_outputs(structured_outputs)
        if guided_json is not None:
            return structured.json_schema(guided_json)
        if guided_regex is not None:
            return structured.regex(guided_regex)
        if guided_choice is not None:
            return structured.choice(guided_choice)
        if guided_grammar is not None:
            return structured.grammar(guided_grammar)
    except RequestError as error:
        raise named_error(error, field) from None
    return None


def _from_response_format(given: ResponseFormat) -> ConstraintSpec:
    if given.json_schema is not None:
        return structured.json_schema(given.json_schema.schema_)
    if given.type == "json_object":
        return structured.json_object()
    return structured.structural_tag(
        given.model_dump(by_alias=True, include={"structures", "triggers"})
    )


def _from_structured_outputs(given: StructuredOutputs) -> ConstraintSpec:
    space: dict[str, Any] = {
        "any_whitespace": not given.disable_any_whitespace,
        "whitespace_pattern": given.whitespace_pattern,
    }
    if given.json_ is not None:
        return structured.json_schema(given.json_, **space)
    if given.structural_tag is not None:
        return structured.structural_tag(given.structural_tag, **space)
    if given.json_object:
        return structured.json_object(**space)
    if given.regex is not None:
        return structured.regex(given.regex)
    if given.choice is not None:
        return structured.choice(given.choice)
    assert given.grammar is not None
    return structured.grammar(given.grammar)
