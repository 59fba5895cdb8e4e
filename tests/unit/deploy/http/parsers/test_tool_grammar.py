"""What a grammar of tool calls lets through, the parser of the same form reads."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from deploy.http.parsers.output_parser import OutputParser
from deploy.http.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text, joined
from deploy.http.parsers.reasoning_format import THINK
from deploy.http.parsers.reasoning_parser import ReasoningParser
from deploy.http.parsers.tool_format import TOOL_FORMATS
from deploy.http.parsers.xml_calls import MiniMaxM2Parser
from engine.constraints import ConstraintSpec, structured
from engine.constraints.grammar_payload import TaggedStructure, Thinking, ToolCalls
from engine.errors import RequestError
from tests.support.grammars import EOS, allowed, feed, small_tokenizer, start, text_of, walk
from tests.support.random_schemas import check_json
from tests.unit.deploy.http.parsers.marked_tokens import MarkedTokens
from tests.unit.deploy.http.parsers.tags import grouped, written

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
SCHEMAS = {"point": POINT, "na.me-1": EMPTY}
FORMS = [
    form
    for form in {id(TOOL_FORMATS[word]): word for word in reversed(list(TOOL_FORMATS))}.values()
    if form != "gpt_oss"
]
"""A word of each form, but for the one that needs tokens which the small model lacks."""
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "additionalProperties": False,
}


def constraint(
    form: str,
    schemas: dict[str, dict[str, Any]] = SCHEMAS,
    *,
    may_answer: bool,
    parallel: bool = True,
    answer: dict[str, Any] | None = None,
) -> ConstraintSpec:
    return TOOL_FORMATS[form].constraint(
        schemas, may_answer=may_answer, parallel=parallel, answer=answer
    )


def parts_of(form: str, text: str, reasoning: ReasoningParser | None = None) -> list[Part]:
    parser = OutputParser(reasoning, TOOL_FORMATS[form].parser(SCHEMAS))
    return joined(parser.feed(text) + parser.finish())


def check_calls(parts: list[Part]) -> int:
    """The calls follow their schemas; returns their number."""
    calls = [part for part in parts if isinstance(part, CallBegin)]
    arguments = [part for part in parts if isinstance(part, CallArguments)]
    for begin, given in zip(calls, arguments, strict=True):
        check_json(given.text, SCHEMAS[begin.name])
    return len(calls)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parallel", [True, False])
def test_demanded_calls(form: str, parallel: bool) -> None:
    spec = constraint(form, may_answer=False, parallel=parallel)
    counts = set()
    for seed in range(20):
        parts = parts_of(form, text_of(walk(start(spec), random.Random(seed))))
        assert not any(isinstance(part, Text) for part in parts)
        counts.add(check_calls(parts))
    assert min(counts) == 1 and (max(counts) > 1) == parallel


@pytest.mark.parametrize("form", FORMS)
def test_calls_that_the_model_chooses(form: str) -> None:
    spec = constraint(form, may_answer=True)
    answer = start(spec)
    feed(answer, "It is 3 < 4, [1] and {x}.")
    assert set(EOS) <= set(allowed(answer))
    call = start(spec)
    head = TOOL_FORMATS[form].parser.marker if TOOL_FORMATS[form].marks_answers else "{"
    feed(call, head)
    assert not set(EOS) & set(allowed(call))
    rng = random.Random(1)
    ids: list[int] = []
    while not set(EOS) & set(allowed(call)):
        ids.append(int(rng.choice(allowed(call))))
        assert call.accept(ids[-1])
    assert check_calls(parts_of(form, head + text_of(ids))) >= 1


@pytest.mark.parametrize("form", FORMS)
def test_calls_or_an_answer_in_json(form: str) -> None:
    spec = constraint(form, may_answer=True, answer=ANSWER)
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
        parts = parts_of("hermes", text, ReasoningParser(THINK.thinking(is_open=is_open)))
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


TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Any."},
        "short": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a b", "<c>"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "point": {"$ref": "#/$defs/point"},
        "any": {},
    },
    "required": ["text", "kind"],
    "$defs": {"point": POINT},
}
XML_FORMS = [form for form in FORMS if TOOL_FORMATS[form].xml is not None]


def may_end(spec: ConstraintSpec, text: str) -> bool | None:
    """Whether an output may end with the text; None if it can't begin so."""
    made = start(spec)
    for token in small_tokenizer().encode(text, add_special_tokens=False):
        if not made.accept(token):
            return None
    return bool(set(EOS) & set(allowed(made)))


@pytest.mark.parametrize("form", XML_FORMS)
def test_values_between_tags_follow_the_schema(form: str) -> None:
    kind = TOOL_FORMATS[form].parser
    spec = constraint(form, {"f": TYPED}, may_answer=False)
    good = {
        "text": "é <b>\n3</tool_call>",
        "short": "x" * 12,
        "kind": "<c>",
        "maybe": "null",
        "point": '{"x": 5}',
        "any": "[true]",
    }
    texts = written(kind, ("f", good)), written(kind, ("f", {"text": "", "kind": "a b"}))
    for text in (*texts, "\n".join(texts) if form != "minimax_m2" else texts[0]):
        assert may_end(spec, text), text
        parts = joined((parser := kind({"f": TYPED})).feed(text) + parser.finish())
        for part in parts:
            if isinstance(part, CallArguments):
                check_json(part.text, TYPED)
    for wrong in (
        {**good, "short": "x" * 40},
        {**good, "kind": "c"},
        {**good, "point": '{"x": 100}'},
        {**good, "any": "text"},
        {"text": "a"},
        {"kind": "a b", "text": "a"},
        {**good, "other": "5"},
    ):
        assert may_end(spec, written(kind, ("f", wrong))) is None, wrong
    assert may_end(spec, written(kind, ("g", good))) is None


@pytest.mark.parametrize("parallel", [True, False])
def test_several_calls_behind_one_marker(parallel: bool) -> None:
    text = written(MiniMaxM2Parser, ("na.me-1", {}), ("point", {"x": "5"}))
    spec = constraint("minimax_m2", may_answer=False, parallel=parallel)
    assert may_end(spec, text) == (True if parallel else None)


@pytest.mark.parametrize("form", XML_FORMS)
@pytest.mark.parametrize(
    "value",
    [
        {"type": "string", "pattern": "^[ab]+$"},
        {"type": ["string", "integer"]},
        {"enum": ["a</parameter></arg_value>", "b"]},
        {"enum": ["a", 1]},
        {"enum": ["a", ""]},
        {"$ref": "#/properties/other"},
    ],
)
def test_schemas_that_tags_cannot_hold_are_followed_in_json(
    form: str, value: dict[str, Any]
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": value, "other": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    parser = TOOL_FORMATS[form].parser({"f": schema})
    text = text_of(
        walk(
            start(constraint(form, {"f": schema}, may_answer=False, parallel=False)),
            random.Random(1),
        )
    )
    begin, arguments = joined(parser.feed(text) + parser.finish())
    assert begin == CallBegin(0, "f") and isinstance(arguments, CallArguments)
    assert '"name"' in text
    check_json(arguments.text, schema)


@pytest.mark.parametrize("form", FORMS)
def test_calls_of_tools_that_are_not_strict(form: str) -> None:
    """They may have any arguments where others are strict."""
    spec = TOOL_FORMATS[form].constraint(
        {"f": None, "point": POINT}, may_answer=True, parallel=True
    )
    kind = TOOL_FORMATS[form].parser
    good = [written(kind, ("f", {"text": "a", "n": "[1]"})), written(kind, ("point", {"x": "5"}))]
    if form in XML_FORMS:
        for text in good:
            assert may_end(spec, text)
        assert may_end(spec, written(kind, ("point", {"y": "5"}))) is None
    assert may_end(spec, "Well.")


@pytest.mark.parametrize("form", XML_FORMS)
def test_objects_of_any_keys_are_followed_in_json(form: str) -> None:
    spec = constraint(form, {"f": {"type": "object"}}, may_answer=False)
    kind = TOOL_FORMATS[form].parser
    assert may_end(spec, written(kind, ("f", {}))) is None
    assert may_end(spec, grouped(kind, ['{"name": "f", "arguments": {"a": 1}}']))


@pytest.mark.parametrize("form", ["glm45", "minimax_m2", "qwen3_coder", "deepseek_v3"])
def test_forms_whose_marks_are_tokens(form: str) -> None:
    """The marks are special tokens, as they may be in the models' tokenizers."""
    made = TOOL_FORMATS[form]
    marks = list(made.words)
    if made.xml is not None:
        tags = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</parameter>")
        marks += [tag for tag in tags if tag in str(made.xml)]
    tokens = MarkedTokens(marks)
    spec = constraint(form, {"f": TYPED if made.xml is not None else POINT}, may_answer=False)
    if made.xml is None:
        begin = made.begin.replace("WORD", "f")
        text = f'{made.parser.marker}{begin}{{"x": 5}}{made.end}{made.closing}'
    else:
        text = written(made.parser, ("f", {"text": "a <b>", "kind": "<c>", "point": '{"x": 5}'}))
    assert tokens.may_end(spec, text)
    ids = tokens.encode(text)
    assert max(ids) >= 4096
    parts = joined((parser := made.parser({"f": TYPED})).feed(tokens.decode(ids)) + parser.finish())
    assert [part.name for part in parts if isinstance(part, CallBegin)] == ["f"]
