"""What a grammar lets a model write that writes messages in channels, whose marks are tokens."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
import tokenizers

from deploy.http.parsers.harmony import ANALYSIS, FINAL, read_channels
from deploy.http.parsers.output_parser import OutputParser
from deploy.http.parsers.parts import CallArguments, CallBegin, Reasoning, joined
from deploy.http.parsers.reasoning_format import HARMONY
from deploy.http.parsers.tool_format import TOOL_FORMATS
from engine.constraints import Constraint, ConstraintSpec, structured
from engine.constraints.grammar_compiler import GrammarCompiler
from tests.support.grammars import MODEL, allowed, start
from tests.support.random_schemas import check_json

MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"]
VOCAB = 4096 + len(MARKS)
EOS = (5, VOCAB - 1)
"""`<|return|>` and `<|call|>`."""
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
CALL = "<|channel|>commentary to=functions.point <|constrain|>json<|message|>"
NEXT = HARMONY.end
CLOSED = HARMONY.thinking(is_open=False)


@cache
def backend() -> tokenizers.Tokenizer:
    """The small model's tokenizer with the marks as special tokens behind its vocabulary."""
    made = json.loads((MODEL / "tokenizer.json").read_text())
    *others, end = made["added_tokens"]
    marks = [end | {"id": 4096 + number, "content": mark} for number, mark in enumerate(MARKS)]
    made["added_tokens"] = [*others, end | {"content": "<|return|>"}, *marks]
    vocabulary = made["model"]["vocab"]
    vocabulary["<|return|>"] = vocabulary.pop(end["content"])
    return tokenizers.Tokenizer.from_str(json.dumps(made))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(backend().to_str, VOCAB, EOS)


def begin(spec: ConstraintSpec) -> Constraint:
    return start(spec, EOS, VOCAB, compiler())


def accepts(spec: ConstraintSpec, text: str) -> bool:
    """Whether the output may begin with the text."""
    constraint = begin(spec)
    ids = backend().encode(text, add_special_tokens=False).ids
    assert backend().decode(ids, skip_special_tokens=False) == text
    return all(constraint.accept(token) for token in ids)


def may_end(spec: ConstraintSpec, text: str) -> bool:
    constraint = begin(spec)
    for token in backend().encode(text, add_special_tokens=False).ids:
        assert constraint.accept(token)
    ends = set(EOS) & set(map(int, allowed(constraint, VOCAB)))
    assert ends in (set(), set(EOS))
    return bool(ends)


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
        rng, constraint = random.Random(seed), begin(spec)
        ids: list[int] = []
        for token in backend().encode(f"{ANALYSIS}Hm{NEXT}{CALL}", add_special_tokens=False).ids:
            assert constraint.accept(token)
            ids.append(token)
        while not set(EOS) & set(found := list(map(int, allowed(constraint, VOCAB)))):
            ids.append(rng.choice(found))
            assert constraint.accept(ids[-1])
        parser = OutputParser(None, read_channels({"point": POINT}, CLOSED))
        text = backend().decode(ids, skip_special_tokens=False)
        thought, name, arguments = joined(parser.feed(text) + parser.finish())
        assert (thought, name) == (Reasoning("Hm"), CallBegin(0, "point"))
        assert isinstance(arguments, CallArguments)
        check_json(arguments.text, POINT)
