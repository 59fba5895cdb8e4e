"""Messages in channels: thoughts, calls and text, cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.http.parsers.harmony import HarmonyParser, read_channels
from deploy.http.parsers.output_parser import OutputParser
from deploy.http.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text
from deploy.http.parsers.reasoning_format import HARMONY
from engine.constraints.grammar_payload import Thinking
from tests.unit.deploy.http.parsers.parsing import call, check_cuts, read

TOOLS: dict[str, dict[str, Any]] = {"f": {}, "get-weather": {}}
NEXT = "<|end|><|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
CLOSED = HARMONY.thinking(is_open=False)
OPEN = HARMONY.thinking(is_open=True)


def to(name: str, arguments: str) -> str:
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    )


def make(thinking: Thinking | None = CLOSED, tools: Any = TOOLS) -> OutputParser:
    return OutputParser(None, read_channels(tools, thinking))


CASES: list[tuple[str, list[Part]]] = [
    (f"{FINAL}Yes. <|x|> ", [Text("Yes. <|x|> ")]),
    (f"{FINAL}Yes.<|return|>", [Text("Yes.")]),
    (f"{ANALYSIS} Hm,\nwell. {NEXT}{FINAL}Yes.", [Reasoning("Hm,\nwell."), Text("Yes.")]),
    (f"{ANALYSIS}{NEXT}{FINAL}Yes.", [Text("Yes.")]),
    (f"{ANALYSIS}Hm", [Reasoning("Hm")]),
    (
        f"{ANALYSIS}One{NEXT}{ANALYSIS}two{NEXT}{FINAL}Yes.",
        [Reasoning("One\ntwo"), Text("Yes.")],
    ),
    (to("f", '{"a": "é <|end", "b": [{}]}'), call("f", '{"a": "é <|end", "b": [{}]}')),
    (
        f"{ANALYSIS}Hm{NEXT}{PREAMBLE}I look.{NEXT}{to('f', '{}')}",
        [Reasoning("Hm"), Text("I look."), *call("f", "{}")],
    ),
    (
        f"{to('f', '{}')}<|start|>assistant{to('get-weather', '{}')}",
        [*call("f", "{}"), *call("get-weather", "{}", 1)],
    ),
    (
        f"{PREAMBLE}One{NEXT}{FINAL}two",
        [Text("One\ntwo")],
    ),
    # The forms in which the recipient stands with the role, or with another channel.
    (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', call("f", '{"a": 1}')),
    (
        f"{ANALYSIS}Hm{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>",
        [Reasoning("Hm"), *call("f", "{}")],
    ),
    ("<|channel|>analysis to=functions.f code<|message|>{}", call("f", "{}")),
    ("<|channel|>commentary to=f<|message|>{}", call("f", "{}")),
    ("<|channel|>commentary to=functions.g<|message|>{}", call("g", "{}")),
    # Arguments that are no object are the call's, too.
    (to("f", ""), call("f", "{}")),
    (to("f", " [1, 2] "), call("f", "[1, 2]")),
    (to("f", "Paris"), call("f", "Paris")),
    (to("f", '{"a": 1}}'), call("f", '{"a": 1}')),
    (to("f", '{"a": 1} then'), [*call("f", '{"a": 1}'), Text("then")]),
    # Other recipients aren't functions.
    (
        "<|channel|>analysis to=browser.search code<|message|>{}<|call|>",
        [Reasoning("{}")],
    ),
    ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", [Text("1 + 1")]),
    # Cut in a head.
    (f"{ANALYSIS}Hm{NEXT}", [Reasoning("Hm")]),
    (f"{ANALYSIS}Hm{NEXT}<|channel|>comm", [Reasoning("Hm")]),
    (f"{ANALYSIS}Hm{NEXT}<|channel|>commentary to=functions.f <|constrain|>", [Reasoning("Hm")]),
    # No messages at all, or broken ones.
    ("Yes. <|channel|>", [Text("Yes. <|channel|>")]),
    (" \n", [Text(" \n")]),
    ("to= be or not", [Text("to= be or not")]),
    ("<|channel|>final\nYes.<|end|>", [Text("<|channel|>final\nYes.")]),
    (f"<|start|>assistant\nYes.{NEXT}{FINAL}No.", [Text("<|start|>assistant\nYes.\nNo.")]),
    ("<|channel|>" + "x" * 600, [Text("<|channel|>" + "x" * 600)]),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_messages_cut_anywhere(text: str, expected: list[Part]) -> None:
    check_cuts(make, text, expected)


def test_prompts_that_end_within_a_message() -> None:
    text = f"more{NEXT}{FINAL}Yes."
    check_cuts(lambda: make(OPEN), text, [Reasoning("more"), Text("Yes.")])
    check_cuts(lambda: make(None), "to=more <|end|>", [Text("to=more ")])


def test_without_tools_there_are_no_calls() -> None:
    check_cuts(lambda: make(tools={}), to("f", '{"a": 1}'), [Text('{"a": 1}')])


def test_demanded_calls_alone_and_at_most_one() -> None:
    text = f"{PREAMBLE}I look.{NEXT}{to('f', '{}')}<|start|>assistant{to('f', '{}')}"
    parser = OutputParser(None, HarmonyParser(TOOLS), 1, may_answer=False)
    assert parser.feed(text) + parser.finish() == call("f", "{}")
    parser = OutputParser(None, HarmonyParser(TOOLS), may_answer=False)
    assert parser.feed(f"{ANALYSIS}Hm<|end|>") == [Reasoning("Hm")]


@pytest.mark.parametrize(
    ("text", "is_cut"),
    [
        (to("f", '{"a": 1}'), False),
        (to("f", '{"a": 1}').removesuffix("<|call|>"), False),
        (to("f", '{"a": 1').removesuffix("<|call|>"), True),
        (to("f", "").removesuffix("<|call|>"), True),
        (to("f", "[1]").removesuffix("<|call|>"), False),
        (to("f", "[1").removesuffix("<|call|>"), True),
    ],
)
def test_a_call_that_lacks_arguments_is_cut(text: str, is_cut: bool) -> None:
    parser = make()
    parser.feed(text)
    parser.finish()
    assert parser.is_cut == is_cut


def test_where_the_thought_ends() -> None:
    parser = make()
    seen = []
    for piece in (ANALYSIS, "Hm", NEXT, f"{ANALYSIS}more", NEXT, FINAL, "Yes."):
        parser.feed(piece)
        seen.append((parser.is_reasoning, parser.has_reasoned, parser.is_within_reasoning))
    within, between, after = (True, True, True), (True, True, False), (False, True, False)
    assert seen == [within, within, between, within, between, after, after]
    plain = make()
    plain.feed("Yes.")
    assert not plain.is_reasoning and not plain.has_reasoned
    cut = make()
    cut.feed(f"{ANALYSIS}Hm")
    cut.finish()
    assert cut.is_within_reasoning


WORDS = st.sampled_from(
    [
        *(
            "<|start|>",
            "assistant",
            "<|channel|>",
            "analysis",
            "final",
            "commentary",
            "<|message|>",
        ),
        *(" to=", "functions.", "f", " <|constrain|>", "json", "<|end|>", "<|call|>", "<|return|>"),
        *(ANALYSIS, FINAL, NEXT, to("f", "{}"), "{}", '{"a": ', '"}"', "}", " ", "\n", "<|", "é"),
    ]
)


@settings(max_examples=500)
@given(words=st.lists(WORDS, max_size=16), cuts=st.lists(st.integers(0, 80), max_size=10))
def test_any_text_cut_anywhere(words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    whole = read(make, text)
    assert read(make, text, [cut for cut in cuts if cut <= len(text)]) == whole
    assert read(make, text, list(range(len(text)))) == whole
    begun = [part.call for part in whole if isinstance(part, CallBegin)]
    assert begun == list(range(len(begun)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=200)
@given(
    thought=st.text(max_size=10),
    given_=st.dictionaries(st.text(), JSON),
    answer=st.text(max_size=9),
)
def test_what_models_write_comes_back(thought: str, given_: dict[str, Any], answer: str) -> None:
    arguments = json.dumps(given_, ensure_ascii=False)
    text = f"{ANALYSIS}{thought}{NEXT}{PREAMBLE}{answer}{NEXT}{to('f', arguments)}"
    parts = read(make, text, list(range(len(text))))
    said = [part.text for part in parts if isinstance(part, Text | CallArguments)]
    assert said == ([answer, arguments] if answer else [arguments])
    thoughts = [part.text for part in parts if isinstance(part, Reasoning)]
    assert "".join(thoughts) == thought.strip(" \t\r\n")
