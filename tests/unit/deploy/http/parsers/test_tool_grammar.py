"""What a grammar of tool calls lets through, the parser of the same form reads."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from deploy.http.parsers.output_parser import OutputParser
from deploy.http.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text, joined
from deploy.http.parsers.reasoning_parser import ReasoningParser
from deploy.http.parsers.tool_format import TOOL_FORMATS
from engine.constraints import structured
from engine.constraints.grammar_payload import TaggedStructure, Thinking, ToolCalls
from engine.errors import RequestError
from tests.support.grammars import EOS, allowed, feed, start, text_of, walk
from tests.support.random_schemas import check_json

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "on": {"type": "boolean"},
    },
    "required": ["x"],
    "additionalProperties": False,
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"point": POINT, 'na"me': EMPTY}
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "additionalProperties": False,
}


def parts_of(form: str, text: str, reasoning: ReasoningParser | None = None) -> list[Part]:
    parser = OutputParser(reasoning, TOOL_FORMATS[form].parser(frozenset(SCHEMAS)))
    return joined(parser.feed(text) + parser.finish())


def check_calls(parts: list[Part]) -> int:
    """The calls follow their schemas; returns their number."""
    calls = [part for part in parts if isinstance(part, CallBegin)]
    arguments = [part for part in parts if isinstance(part, CallArguments)]
    for begin, given in zip(calls, arguments, strict=True):
        check_json(given.text, SCHEMAS[begin.name])
    return len(calls)


@pytest.mark.parametrize("form", TOOL_FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_demanded_calls(form: str, parallel: bool) -> None:
    spec = TOOL_FORMATS[form].constraint(SCHEMAS, may_answer=False, parallel=parallel)
    counts = set()
    for seed in range(12):
        parts = parts_of(form, text_of(walk(start(spec), random.Random(seed))))
        assert not any(isinstance(part, Text) for part in parts)
        counts.add(check_calls(parts))
    assert min(counts) == 1 and (max(counts) > 1) == parallel


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_calls_that_the_model_chooses(form: str) -> None:
    spec = TOOL_FORMATS[form].constraint(SCHEMAS, may_answer=True, parallel=True)
    answer = start(spec)
    feed(answer, "It is 3 < 4, [1] and {x}.")
    assert set(EOS) <= set(allowed(answer))
    call = start(spec)
    head = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "{"}[form]
    feed(call, head)
    assert not set(EOS) & set(allowed(call))
    rng = random.Random(1)
    text = head
    while not set(EOS) & set(allowed(call)):
        token = int(rng.choice(allowed(call)))
        assert call.accept(token)
        text += text_of([token])
    assert check_calls(parts_of(form, text)) >= 1


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_calls_or_an_answer_in_json(form: str) -> None:
    spec = TOOL_FORMATS[form].constraint(SCHEMAS, may_answer=True, parallel=True, answer=ANSWER)
    kinds = set()
    for seed in range(30):
        parts = parts_of(form, text_of(walk(start(spec), random.Random(seed))))
        kinds.add(type(parts[0]))
        if isinstance(parts[0], Text):
            check_json(parts[0].text, ANSWER)
        else:
            check_calls(parts)
    assert kinds == {Text, CallBegin}


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        (structured.json_schema(ANSWER), '{"ok": true}'),
        (structured.json_object(), '{"a": 1}'),
        (structured.choice(["yes", "no"]), "no"),
        (structured.regex("[a-c]{3}"), "abc"),
        (structured.grammar('start: "x"'), "x"),
        (structured.grammar('root ::= "x"'), "x"),
    ],
)
def test_constraints_begin_behind_the_reasoning(spec: Any, answer: str, is_open: bool) -> None:
    spec = structured.after_thinking(spec, Thinking("<think>", "</think>", is_open))
    begin = "" if is_open else "<think>"
    for text in (f"{begin}Hm {{ <x\n</think>\n\n{answer}", f"{begin}</think>{answer}"):
        constraint = start(spec)
        feed(constraint, text)
        assert set(EOS) <= set(allowed(constraint)), text
        parts = parts_of("hermes", text, ReasoningParser(is_open))
        assert parts[-1] == Text(answer)
        assert all(isinstance(part, Reasoning) for part in parts[:-1])
    if not is_open:
        constraint = start(spec)
        feed(constraint, answer)
        assert set(EOS) <= set(allowed(constraint))


def test_marks_that_are_special_tokens() -> None:
    calls = ToolCalls(
        [TaggedStructure('{"name": "point", "arguments": ', POINT, "}")],
        marker="<|user|>",
        opening="\n",
        closing="\n<|system|>",
        between="\n",
        words=["<|user|>", "<|system|>"],
    )
    constraint = start(structured.tool_calls(calls))
    assert allowed(constraint) == [2], "the token, not its text"
    ids = walk(constraint, random.Random(3))
    assert ids.count(2) == ids.count(4) >= 1
    calls.may_answer = True
    constraint = start(structured.tool_calls(calls))
    feed(constraint, "Hello")
    assert constraint.accept(2) and not set(EOS) & set(allowed(constraint))


def test_limits_of_tools() -> None:
    schemas = {f"f{i}": EMPTY for i in range(129)}
    spec = TOOL_FORMATS["hermes"].constraint(schemas, may_answer=False, parallel=True)
    with pytest.raises(RequestError, match="129 tools"):
        start(spec)
    deep: dict[str, Any] = json.loads('{"items":' * 70 + "{}" + "}" * 70)
    spec = TOOL_FORMATS["hermes"].constraint({"f": deep}, may_answer=False, parallel=True)
    with pytest.raises(RequestError, match="nested deeper"):
        start(spec)
