"""What a grammar lets a model write that writes messages in channels, whose marks are tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from deploy.http.parsers.harmony import ANALYSIS, FINAL, read_channels
from deploy.http.parsers.output_parser import OutputParser
from deploy.http.parsers.parts import CallArguments, CallBegin, Reasoning, joined
from deploy.http.parsers.reasoning_format import HARMONY
from deploy.http.parsers.tool_format import TOOL_FORMATS
from engine.constraints import ConstraintSpec, structured
from tests.support.random_schemas import check_json
from tests.unit.deploy.http.parsers.marked_tokens import MarkedTokens

MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"]
TOKENS = MarkedTokens(MARKS, ends=("<|call|>",))
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
CALL = "<|channel|>commentary to=functions.point <|constrain|>json<|message|>"
NEXT = HARMONY.end
CLOSED = HARMONY.thinking(is_open=False)


def may_end(spec: ConstraintSpec, text: str) -> bool:
    ends = TOKENS.may_end(spec, text)
    assert ends is not None
    return ends


def accepts(spec: ConstraintSpec, text: str) -> bool:
    return TOKENS.may_end(spec, text) is not None


def calls(is_open: bool = False, **options: Any) -> ConstraintSpec:
    made = TOOL_FORMATS["gpt_oss"].constraint({"point": POINT}, parallel=True, **options)
    return structured.after_thinking(made, HARMONY.thinking(is_open=is_open))


@pytest.mark.parametrize("before", ["", f"{ANALYSIS}Hm <x|>.{NEXT}"])
def test_demanded_calls(before: str) -> None:
    spec = calls(may_answer=False)
    call = f'{before}{CALL}{{"x": 5}}'
    assert may_end(spec, call) and not may_end(spec, call[:-1])
    assert not accepts(spec, f"{before}{FINAL}")
    assert not accepts(spec, f"{before}Yes.")
    assert not accepts(spec, f'{before}{CALL}{{"x": 100')
    assert not accepts(spec, call.replace("point", "other"))
    assert not accepts(spec, call + " then")


def test_a_prompt_that_ends_within_a_thought() -> None:
    spec = calls(is_open=True, may_answer=False)
    assert may_end(spec, f'more{NEXT}{CALL}{{"x": 5}}')
    assert not may_end(spec, "more")


def test_calls_or_an_answer() -> None:
    spec = calls(may_answer=True)
    assert may_end(spec, f'{CALL}{{"x": 5}}') and not accepts(spec, f'{CALL}{{"y')
    assert may_end(spec, f"{FINAL}Yes, {{5}}.") and not may_end(spec, "<|channel|>")
    spec = calls(may_answer=True, answer=POINT)
    assert may_end(spec, f'{ANALYSIS}Hm{NEXT}{FINAL}{{"x": 5}}')
    assert may_end(spec, f'{CALL}{{"x": 5}}') and not accepts(spec, f"{FINAL}Yes")


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        (structured.json_schema(POINT), '{"x": 5}'),
        (structured.choice(["yes", "no"]), "no"),
        (structured.grammar('start: "x"'), "x"),
    ],
)
def test_formats_begin_in_the_final_message(spec: ConstraintSpec, answer: str) -> None:
    spec = structured.after_thinking(spec, CLOSED)
    for before in (f"{ANALYSIS}Hm{NEXT}{FINAL}", FINAL):
        assert may_end(spec, f"{before}{answer}") and not may_end(spec, before)
        assert not accepts(spec, f"{before}?")
    assert not accepts(spec, answer)


def test_what_the_grammar_lets_through_the_parser_reads() -> None:
    spec = calls(may_answer=False)
    for seed in range(10):
        rng, constraint = random.Random(seed), TOKENS.begin(spec)
        ids = TOKENS.encode(f"{ANALYSIS}Hm{NEXT}{CALL}")
        assert all(constraint.accept(token) for token in ids)
        while not set(TOKENS.eos) & (found := TOKENS.next(constraint)):
            ids.append(rng.choice(sorted(found)))
            assert constraint.accept(ids[-1])
        parser = OutputParser(None, read_channels({"point": POINT}, CLOSED))
        text = TOKENS.decode(ids)
        thought, name, arguments = joined(parser.feed(text) + parser.finish())
        assert (thought, name) == (Reasoning("Hm"), CallBegin(0, "point"))
        assert isinstance(arguments, CallArguments)
        check_json(arguments.text, POINT)
