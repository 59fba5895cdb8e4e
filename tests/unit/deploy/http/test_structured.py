"""`response_format`, `structured_outputs` and `guided_*` become constraints."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.http.generation.plan import check_constraint
from deploy.http.generation.request import NamedConstraint
from deploy.http.openai.structured import (
    ResponseFormat,
    StructuredOutputs,
    constraint_field,
    constraint_spec,
)
from engine.constraints import structured
from engine.errors import RequestError
from tests.support.fake_client import FakeEngineClient

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}, "required": ["a"]}
TAGS = {
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


def parts(body: dict[str, Any]) -> tuple[Any, ...]:
    """A body's fields in the order of `constraint_spec`."""
    form, outputs = body.get("response_format"), body.get("structured_outputs")
    return (
        None if form is None else ResponseFormat.model_validate(form),
        None if outputs is None else StructuredOutputs.model_validate(outputs),
        *(body.get(f"guided_{name}") for name in ("json", "regex", "choice", "grammar")),
    )


@pytest.mark.parametrize(
    ("body", "spec", "field"),
    [
        ({}, None, ""),
        ({"response_format": {"type": "text"}}, None, ""),
        ({"response_format": {"type": "json_object"}}, structured.json_object(), "response_format"),
        (
            {"response_format": JSON_SCHEMA},
            structured.json_schema(SCHEMA),
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "s",
                        "strict": False,
                        "description": "d",
                        "schema": SCHEMA,
                    },
                }
            },
            structured.json_schema(SCHEMA),
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "structural_tag", **TAGS}},
            structured.structural_tag(TAGS),
            "response_format",
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            structured.json_schema(SCHEMA),
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
            structured.json_schema(json.dumps(SCHEMA), any_whitespace=False),
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": "[ ]?"}},
            structured.json_object(whitespace_pattern="[ ]?"),
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"regex": "a+", "json_object": False}},
            structured.regex("a+"),
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            structured.choice(["a", "b"]),
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            structured.grammar('root ::= "a"'),
            "structured_outputs.grammar",
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
            structured.structural_tag(json.dumps(TAGS)),
            "structured_outputs.structural_tag",
        ),
        ({"guided_json": SCHEMA}, structured.json_schema(SCHEMA), "guided_json"),
        (
            {"guided_json": json.dumps(SCHEMA)},
            structured.json_schema(json.dumps(SCHEMA)),
            "guided_json",
        ),
        ({"guided_regex": "a"}, structured.regex("a"), "guided_regex"),
        ({"guided_choice": ["a"]}, structured.choice(["a"]), "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, structured.grammar('start: "a"'), "guided_grammar"),
    ],
)
def test_what_is_accepted(body: dict[str, Any], spec: Any, field: str) -> None:
    assert constraint_spec(*parts(body)) == spec
    assert constraint_field(*parts(body)) == field


def test_properties_keep_their_order() -> None:
    spec = constraint_spec(*parts({"response_format": JSON_SCHEMA}))
    assert spec is not None
    assert list(json.loads(spec.payload["value"])["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "response_format and guided_regex exclude each other",
            "guided_regex",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "guided_json": {}},
            "exclude each other",
            "guided_json",
        ),
        ({"guided_choice": []}, "Choice takes 1 to", "guided_choice"),
        ({"guided_regex": ""}, "must not be empty", "guided_regex"),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " " * 300}},
            "at most 256",
            "structured_outputs.json_object",
        ),
        ({"guided_regex": "\ud800"}, "surrogate", "guided_regex"),
        ({"guided_json": "x" * 100_000}, "100000 bytes", "guided_json"),
    ],
)
def test_what_is_refused(body: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        constraint_spec(*parts(body))
    assert (refused.value.param, refused.value.status) == (param, 400)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (ResponseFormat, {}, "Field required"),
        (ResponseFormat, {"type": "xml"}, "Input should be"),
        (ResponseFormat, {"type": "json_schema"}, "needs json_schema"),
        (ResponseFormat, {"type": "json_schema", "json_schema": {"name": "a"}}, "schema"),
        (ResponseFormat, {"type": "json_schema", "json_schema": {"schema": {}}}, "name"),
        (ResponseFormat, {**JSON_SCHEMA, "type": "json_object"}, "doesn't belong"),
        (ResponseFormat, {"type": "structural_tag", "triggers": ["a"]}, "needs structures"),
        (ResponseFormat, {"type": "structural_tag", "format": {}}, "format is not supported yet"),
        (ResponseFormat, {"type": "text", "extra": 1}, "Extra inputs"),
        (StructuredOutputs, {}, "takes one of json, regex"),
        (StructuredOutputs, {"json_object": False}, "takes one of"),
        (StructuredOutputs, {"regex": "a", "choice": ["a"]}, "not regex and choice"),
        (StructuredOutputs, {"regex": 1}, "valid string"),
        (StructuredOutputs, {"choice": [1]}, "valid string"),
        (StructuredOutputs, {"json": 1}, "valid"),
        (StructuredOutputs, {"regex": "a", "disable_any_whitespace": True}, "for JSON, not for"),
        (StructuredOutputs, {"json": {}, "disable_additional_properties": True}, "not supported"),
        (StructuredOutputs, {"json": {}, "backend": "x"}, "Extra inputs"),
    ],
)
def test_wrong_shapes(kind: Any, value: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        kind.model_validate(value)


def test_null_means_not_given() -> None:
    given = StructuredOutputs.model_validate(
        {"json": None, "regex": "a", "whitespace_pattern": None}
    )
    assert given.kind() == "regex"
    assert ResponseFormat.model_validate({"type": "text", "json_schema": None}).json_schema is None


def test_a_check_names_the_field() -> None:
    client = FakeEngineClient()
    spec = structured.regex("a")
    asyncio.run(check_constraint(client, NamedConstraint(spec, "guided_regex")))
    assert client.checked == [spec]
    client.constraint_error = RequestError("the grammar is bad", "constraint")
    with pytest.raises(RequestError, match=r"^The grammar is bad\.$") as refused:
        asyncio.run(check_constraint(client, NamedConstraint(spec, "guided_regex")))
    assert refused.value.param == "guided_regex"
    client.constraint_error = RequestError("too many", status=429)
    with pytest.raises(RequestError) as refused:
        asyncio.run(check_constraint(client, NamedConstraint(spec, "guided_regex")))
    assert (refused.value.param, refused.value.status) == (None, 429)
