"""The parts of outputs: the same however the text is cut, and nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.http.parsers import deepseek
from deploy.http.parsers.deepseek import DeepSeekParser
from deploy.http.parsers.granite import GraniteParser
from deploy.http.parsers.hermes import HermesParser
from deploy.http.parsers.llama3 import Llama3Parser
from deploy.http.parsers.mistral import MistralParser
from deploy.http.parsers.output_parser import OutputParser
from deploy.http.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text
from deploy.http.parsers.pythonic import Llama4Parser, PythonicParser
from deploy.http.parsers.reasoning_format import GRANITE, THINK
from deploy.http.parsers.reasoning_parser import ReasoningParser
from deploy.http.parsers.tool_parser import ToolParser
from tests.unit.deploy.http.parsers.parsing import call, check_cuts, parsed, read

PARSERS: list[type[ToolParser]] = [
    HermesParser,
    Llama3Parser,
    MistralParser,
    GraniteParser,
    DeepSeekParser,
    PythonicParser,
    Llama4Parser,
]
TOOLS: dict[str, dict[str, Any]] = {"f": {}, "get-weather": {}}


def parse(kind: type[ToolParser], text: str, cuts: list[int] | None = None) -> list[Part]:
    return parsed(kind, TOOLS, text, cuts)


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'
CASES: list[tuple[type[ToolParser], str, list[Part]]] = [
    (HermesParser, HERMES, call("f", '{"a": [1, "}"]}')),
    (HermesParser, f"Sure.\n{HERMES}\n", [Text("Sure."), *call("f", '{"a": [1, "}"]}')]),
    (
        HermesParser,
        f'{HERMES}\n<tool_call>{{"arguments": {{}}, "id": [3], "name": "g"}}</tool_call> Done. ',
        [*call("f", '{"a": [1, "}"]}'), *call("g", "{}", 1), Text(" Done.")],
    ),
    (HermesParser, '<tool_call>{"name": "f"}', call("f", "{}")),
    (HermesParser, '<tool_call>{"name": "f", "arguments": null}', call("f", "{}")),
    (HermesParser, '<tool_call>{"name": "f", "parameters": {"a": 1}}', call("f", '{"a": 1}')),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}',
        call("f", '{"a": 1}'),
    ),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "x', call("f", '{"a": "x')),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {}, oops}</tool_call>',
        [*call("f", "{}"), Text("oops}")],
    ),
    (Llama3Parser, ' {"name": "f", "parameters": {"a": 1}}', call("f", '{"a": 1}')),
    (
        Llama3Parser,
        '{"name": "f", "parameters": {}}; {"name": "get-weather", "parameters": {"b": 2}}',
        [*call("f", "{}"), *call("get-weather", '{"b": 2}', 1)],
    ),
    (
        Llama3Parser,
        'I look. <|python_tag|>{"name": "f", "parameters": {}}',
        [Text("I look."), *call("f", "{}")],
    ),
    (MistralParser, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', call("f", '{"a": 1}')),
    (
        MistralParser,
        'Ok [TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
        [Text("Ok"), *call("f", "{}"), *call("g", "{}", 1)],
    ),
    (
        MistralParser,
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": {}}',
        [*call("f", '{"a": 1}'), *call("g", '{"b": {}}', 1)],
    ),
    (MistralParser, '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', call("f", '{"a": 1}')),
]
F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "get-weather", "arguments": {}}'
BOTH = [*call("f", '{"a": 1}'), *call("get-weather", "{}", 1)]
# What models leave around their calls.
CASES += [
    (HermesParser, f"<tool_call>\n{F}}}\n</tool_call>", BOTH[:2]),
    (HermesParser, f"<tool_call>{F}\n{G}</tool_call>", BOTH),
    (HermesParser, f"<tool_call>{F}, {G}</tool_call>", BOTH),
    (HermesParser, f"<tool_call>[{F}, {G}]</tool_call> ", BOTH),
    (HermesParser, f"<tool_call>{F}</tool_call>;\n<tool_call>{G}</tool_call>,", BOTH),
    (HermesParser, f"<tool_call>{F};</tool_call>}} Done.", [*BOTH[:2], Text(" Done.")]),
    (Llama3Parser, F + "}", BOTH[:2]),
    (Llama3Parser, F + ";", BOTH[:2]),
    (Llama3Parser, f"{F}\n{G}", BOTH),
    (Llama3Parser, f"{F}, {G}", BOTH),
    (Llama3Parser, f"{F}}};{G}}}", BOTH),
    (Llama3Parser, f"<|python_tag|>{F}\n{G}\n", BOTH),
    (Llama3Parser, f"{F}; So it is.", [*BOTH[:2], Text(" So it is.")]),
    (MistralParser, f"[TOOL_CALLS][{F}}}, {G}]", BOTH),
    (MistralParser, f"[TOOL_CALLS][{F}\n{G}]", BOTH),
    (MistralParser, f"[TOOL_CALLS][{F};{G}];", BOTH),
    (MistralParser, 'Ok[TOOL_CALLS]f[ARGS]{"a": 1}}[TOOL_CALLS]get-weather[ARGS]{}\n',
     [Text("Ok"), *BOTH]),
    (HermesParser, f"<tool_call>\n<tool_call>\n{F}\n</tool_call>\n</tool_call>\n", BOTH[:2]),
    (HermesParser, f"<tool_call>{F}</tool_call>\n</tool_call><tool_call>{G}</tool_call>", BOTH),
    (HermesParser, f"<tool_call>{F} then</tool_call> Done.",
     [*BOTH[:2], Text(" then Done.")]),
    (HermesParser, f"<tool_call>{F[:-1]}</tool_call>", BOTH[:2]),
    (HermesParser, f"<tool_call>{F}</tool_call> Then {{x}}.", [*BOTH[:2], Text(" Then {x}.")]),
    (Llama3Parser, f"[{F}, {G}]", BOTH),
    (Llama3Parser, f"<|python_tag|>[{F}, {G}]", BOTH),
    (Llama3Parser, f"<|python_tag|>{F}<|python_tag|>{G}", BOTH),
    (MistralParser, f"[TOOL_CALLS]{F}, {G}", BOTH),
    (MistralParser, '[TOOL_CALLS]f{"a": 1}, get-weather{}', BOTH),
    (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": 1}\nget-weather[ARGS]{};', BOTH),
    (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": 1} So it is.', [*BOTH[:2], Text(" So it is.")]),
]  # fmt: skip
# Arguments that are no object are the call's, too.
CASES += [
    (HermesParser, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', call("f", "[1]")),
    (HermesParser, '<tool_call>{"name": "f", "arguments": 3}</tool_call> Ok',
     [*call("f", "3"), Text(" Ok")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "no"}</tool_call>', call("f", "no")),
    (HermesParser, '<tool_call>{"arguments": "{\'a\': 1}", "name": "f"}', call("f", "{'a': 1}")),
    (HermesParser, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', call("f", "{}")),
    (Llama3Parser, '{"name": "f", "parameters": [1, 2]}', call("f", "[1, 2]")),
    (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": [1]}]', call("f", "[1]")),
    (MistralParser, "[TOOL_CALLS]f[ARGS][1]", call("f", "[1]")),
]  # fmt: skip
A1 = '{"a": 1}'
CALLS_BEGIN, CALLS_END = DeepSeekParser.marker, DeepSeekParser.closing


def v3(name: str, arguments: str) -> str:
    return (
        f"{deepseek.CALL}function{deepseek.SEPARATOR}{name}\n```json\n{arguments}\n```"
        f"{deepseek.CALL_END}"
    )


def v31(name: str, arguments: str) -> str:
    return f"{deepseek.CALL}{name}{deepseek.SEPARATOR}{arguments}{deepseek.CALL_END}"


CASES += [
    (GraniteParser, f"<|tool_call|>[{F}, {G}]", BOTH),
    (GraniteParser, f"Ok <tool_call>[{F}]", [Text("Ok"), *BOTH[:2]]),
    (GraniteParser, f"<|tool_call|> {F}", BOTH[:2]),
    (GraniteParser, f"<|tool_call|><tool_call>[{F}]\n<|tool_call|>[{G}] Ok", [*BOTH, Text(" Ok")]),
    (DeepSeekParser, f"{CALLS_BEGIN}{v3('f', A1)}{CALLS_END}", BOTH[:2]),
    (DeepSeekParser, f"{CALLS_BEGIN}{v31('f', A1)}{CALLS_END}", BOTH[:2]),
    (
        DeepSeekParser,
        f"Ok.\n{CALLS_BEGIN}{v3('f', A1)}\n{v3('get-weather', '{}')}{CALLS_END} Done.",
        [Text("Ok."), *BOTH, Text(" Done.")],
    ),
    (
        DeepSeekParser,
        f"{CALLS_BEGIN}{v31('f', A1)}{v31('get-weather', '{}')}{CALLS_END}\n",
        BOTH,
    ),
    (DeepSeekParser, f"{CALLS_BEGIN}{v31('function', '{}')}{CALLS_END}", call("function", "{}")),
    (DeepSeekParser, f"{CALLS_BEGIN}\n{v31('g', '[1]')}", call("g", "[1]")),
    (DeepSeekParser, CALLS_BEGIN + v3("f", '{"a": "```<｜tool▁sep｜>"}') + CALLS_END,
     call("f", '{"a": "```<｜tool▁sep｜>"}')),
    (PythonicParser, "[f(a=1)]", BOTH[:2]),
    (PythonicParser, " [f(a=1), get-weather()]\n", BOTH),
    (
        PythonicParser,
        "[f(a='é \\'(\\n', b=[1, -2.5, (True,)], c={\"x\": None, 'y': false})]",
        call("f", '{"a": "é \'(\\n", "b": [1, -2.5, [true]], "c": {"x": null, "y": false}}'),
    ),
    (PythonicParser, "I look.\n```tool_code\nf(a=1)\n```\nOk",
     [Text("I look."), *BOTH[:2], Text("\nOk")]),
    (PythonicParser, "```tool_code\n[f(a=1), get-weather()]\n```", BOTH),
    (PythonicParser, "```tool_code\nf(a=1)\nget-weather()\n```", BOTH),
    (PythonicParser, "[f(a=1)] So it is.", [*BOTH[:2], Text(" So it is.")]),
    (PythonicParser, f"[{F}, {G}]", BOTH),
    (PythonicParser, F, BOTH[:2]),
    (Llama4Parser, "<|python_start|>[f(a=1), get-weather()]<|python_end|>", BOTH),
    (Llama4Parser, "[f(a=1)]", BOTH[:2]),
    (Llama4Parser, f"<|python_start|>{F}<|python_end|>", BOTH[:2]),
    (Llama4Parser, f"{F}; {G}", BOTH),
]  # fmt: skip
# A call that was cut is one as soon as its name is known. What closes it may be cut, too.
CUT: list[tuple[type[ToolParser], str, list[Part]]] = [
    (HermesParser, '<tool_call>{"name": "f"', [CallBegin(0, "f")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": ', [CallBegin(0, "f")]),
    (HermesParser, 'Ok <tool_call>\n{"name": "f", "argu', [Text("Ok"), CallBegin(0, "f")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a', call("f", '{"a')),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b', call("f", '{"a": "b')),
    (HermesParser, '<tool_call>{"name": "f", "arguments": [1, ', call("f", "[1, ")),
    (Llama3Parser, '{"name": "f", "par', [CallBegin(0, "f")]),
    (MistralParser, '[TOOL_CALLS][{"name": "f", ', [CallBegin(0, "f")]),
    (MistralParser, "[TOOL_CALLS]f[ARGS]", [CallBegin(0, "f")]),
    (MistralParser, '[TOOL_CALLS]f[ARGS]{"a', call("f", '{"a')),
    (GraniteParser, '<|tool_call|>[{"name": "f", ', [CallBegin(0, "f")]),
    (DeepSeekParser, f"{CALLS_BEGIN}{deepseek.CALL}f{deepseek.SEPARATOR}", [CallBegin(0, "f")]),
    (
        DeepSeekParser,
        f"{CALLS_BEGIN}{deepseek.CALL}function{deepseek.SEPARATOR}f\n```js",
        [CallBegin(0, "f")],
    ),
    (DeepSeekParser, f'{CALLS_BEGIN}{deepseek.CALL}f{deepseek.SEPARATOR}{{"a', call("f", '{"a')),
    (PythonicParser, "[f(a='x", [CallBegin(0, "f")]),
    (PythonicParser, "```tool_code\nf(", [CallBegin(0, "f")]),
]
CUT_BEHIND: list[tuple[type[ToolParser], str, list[Part]]] = [
    (HermesParser, f"<tool_call>{F[:-1]}", BOTH[:2]),
    (HermesParser, f"<tool_call>{F}\n</tool", BOTH[:2]),
    (HermesParser, f"<tool_call>{F}\n</tool_call>\n<tool_", [*BOTH[:2], Text("\n<tool_")]),
    (HermesParser, f"<tool_call>{F} then</tool_ca", [*BOTH[:2], Text(" then")]),
    (Llama3Parser, f"{F}; ", BOTH[:2]),
    (MistralParser, f"[TOOL_CALLS][{F}, ", BOTH[:2]),
    (DeepSeekParser, f"{CALLS_BEGIN}{v3('f', A1)[:-10]}", BOTH[:2]),
    (DeepSeekParser, f"{CALLS_BEGIN}{v31('f', A1)}{CALLS_END[:-4]}", BOTH[:2]),
    (PythonicParser, "[f(a=1), ", BOTH[:2]),
    (PythonicParser, "```tool_code\nf(a=1)\n``", BOTH[:2]),
]
NO_CALLS: list[tuple[type[ToolParser], str]] = [
    (HermesParser, "Hello.\n"),
    (HermesParser, "  \n"),
    (HermesParser, "a \n<tool_call> nope </tool_call>\n"),
    (HermesParser, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f'),
    (HermesParser, "x <tool_ca"),
    (HermesParser, "<tool_call><tool_call>{}"),
    (Llama3Parser, '{"name": "unknown", "parameters": {"a": 1}}'),
    (Llama3Parser, '{"city": "Paris", "name": "f'),
    (Llama3Parser, '{"a": {"name": "f", "parameters": {}}}'),
    (Llama3Parser, 'See {"name": "f", "parameters": {}}'),
    (Llama3Parser, "<|python_tag|>print(1)"),
    (MistralParser, "[TOOL_CALLS] [1, 2]"),
    (MistralParser, "[TOOL_CALLS]f[ARGS] no"),
    (MistralParser, "[TOOL_CALLS]"),
    (GraniteParser, "<|tool_call|> [1, 2]"),
    (GraniteParser, "<|tool_call|"),
    (DeepSeekParser, f"{CALLS_BEGIN} nope {CALLS_END}"),
    (DeepSeekParser, f"{CALLS_BEGIN}{deepseek.CALL}f{deepseek.SEPARATOR}nope{deepseek.CALL_END}"),
    (DeepSeekParser, f"{CALLS_BEGIN}{deepseek.CALL}function{deepseek.SEPARATOR}get-wea"),
    (DeepSeekParser, f"{CALLS_BEGIN}{deepseek.CALL}function{deepseek.SEPARATOR}f\n{{}}"),
    (DeepSeekParser, f"{CALLS_BEGIN}{deepseek.CALL}get-wea"),
    (PythonicParser, "[unknown(a=1)]"),
    (PythonicParser, "[f(a=g(1))]"),
    (PythonicParser, "[f(a=1 b=2)]"),
    (PythonicParser, "[f(**{})]"),
    (PythonicParser, "[f(1)]"),
    (PythonicParser, "[f(a={**{}})]"),
    (PythonicParser, "[f, 2]"),
    (PythonicParser, "[1, 2]"),
    (PythonicParser, "f(a=1)"),
    (PythonicParser, "See [f(a=1)]"),
    (PythonicParser, "```tool_code\nprint(f(a=1))\n```"),
    (PythonicParser, "[get-wea"),
    (Llama4Parser, "<|python_start|>print(1)<|python_end|>"),
]


@pytest.mark.parametrize(("kind", "text", "expected"), CASES + CUT + CUT_BEHIND)
def test_calls_cut_anywhere(kind: type[ToolParser], text: str, expected: list[Part]) -> None:
    check_cuts(lambda: OutputParser(None, kind(TOOLS), None), text, expected)


@pytest.mark.parametrize(("kind", "text", "is_cut"), [
    *((kind, text, True) for kind, text, _ in CUT),
    *((kind, text, False) for kind, text, _ in CUT_BEHIND),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {}, oops}</tool_call>', False),
])  # fmt: skip
def test_a_call_that_lacks_arguments_is_cut(
    kind: type[ToolParser], text: str, is_cut: bool
) -> None:
    parser = kind(TOOLS)
    parser.feed(text)
    parser.finish()
    assert parser.is_cut == is_cut


@pytest.mark.parametrize(("kind", "text"), NO_CALLS)
def test_what_is_no_call_stays_text(kind: type[ToolParser], text: str) -> None:
    for cuts in ([], list(range(len(text)))):
        assert parse(kind, text, cuts) == [Text(text)]


WORDS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "; ", ", "),
        *('{"name": ', '"f"', '"get-weather"', ', "arguments": ', ', "parameters": ', "{}", "}"),
        *("<|tool_call|>", CALLS_BEGIN, CALLS_END, deepseek.CALL, deepseek.CALL_END, "function"),
        *(deepseek.SEPARATOR, "```json", "```", "```tool_code", "f(", "a=", "1", ")", "'"),
        *("<|python_start|>", "<|python_end|>", "f", "get-weather"),
        *('{"a": "}\\""}', "[", "]", " ", "\n", "text", "<", "{", '"', "é"),
    ]
)
CUTS = st.lists(st.integers(0, 60), max_size=10)


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=300)
@given(words=st.lists(WORDS, max_size=14), cuts=CUTS)
def test_any_text_cut_anywhere(kind: type[ToolParser], words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    cuts = [cut for cut in cuts if cut <= len(text)]
    whole = parse(kind, text)
    assert parse(kind, text, cuts) == whole
    assert parse(kind, text, list(range(len(text)))) == whole
    if not any(isinstance(part, CallBegin) for part in whole):
        assert "".join(part.text for part in whole if isinstance(part, Text)) == text
    begun = [part.call for part in whole if isinstance(part, CallBegin)]
    assert begun == list(range(len(begun)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(TOOLS)), st.dictionaries(st.text(), JSON, max_size=4)),
    min_size=1,
    max_size=4,
)


def written(kind: type[ToolParser], calls: list[tuple[str, dict[str, Any]]]) -> str:
    if kind is DeepSeekParser:
        texts = [v3(name, json.dumps(given, ensure_ascii=False)) for name, given in calls]
        return CALLS_BEGIN + "\n".join(texts) + CALLS_END
    key = "parameters" if issubclass(kind, Llama3Parser) else "arguments"
    texts = [json.dumps({"name": name, key: given}, ensure_ascii=False) for name, given in calls]
    if kind is HermesParser:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    if kind in (MistralParser, GraniteParser):
        return f"{kind.marker}[{', '.join(texts)}]"
    return "; ".join(texts)


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=200)
@given(calls=CALLS, cuts=CUTS)
def test_calls_as_models_write_them(
    kind: type[ToolParser], calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    text = written(kind, calls)
    parts = parse(kind, text, [cut for cut in cuts if cut <= len(text)])
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    arguments = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
    assert list(zip(names, arguments, strict=True)) == calls
    assert not any(isinstance(part, Text) for part in parts)


def test_calls_beyond_the_limit_are_dropped() -> None:
    text = written(HermesParser, [("f", {"a": 1}), ("f", {"a": 2})])
    parts = read(lambda: OutputParser(None, HermesParser(TOOLS), 1), f"Hi. {text}")
    assert parts == [Text("Hi."), *call("f", '{"a": 1}')]


REASONING = [
    (True, "I think.\n</think>\n\nYes.", [Reasoning("I think."), Text("Yes.")]),
    (True, "<think>\nI\nthink.</think>Yes. ", [Reasoning("I\nthink."), Text("Yes. ")]),
    (True, "I think", [Reasoning("I think")]),
    (True, "<thi", [Reasoning("<thi")]),
    (True, "</think>Yes.", [Text("Yes.")]),
    (True, f"a</think>{HERMES}", [Reasoning("a"), *call("f", '{"a": [1, "}"]}')]),
    (False, "<think>a</th b</think> c", [Reasoning("a</th b"), Text("c")]),
    (False, "\n<think>\n\n</think>\n\nYes.", [Text("Yes.")]),
    (False, " Yes.</think>", [Text(" Yes.</think>")]),
    (False, "<thin", [Text("<thin")]),
]


@pytest.mark.parametrize(("is_open", "text", "expected"), REASONING)
def test_reasoning_cut_anywhere(is_open: bool, text: str, expected: list[Part]) -> None:
    def make() -> OutputParser:
        return OutputParser(
            ReasoningParser(THINK.thinking(is_open=is_open)), HermesParser(TOOLS), None
        )

    check_cuts(make, text, expected)


@settings(max_examples=200)
@given(calls=CALLS)
def test_calls_in_python(calls: list[tuple[str, dict[str, Any]]]) -> None:
    named = [
        (name, {f"a{number}": value for number, value in enumerate(given.values())})
        for name, given in calls
    ]
    texts = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in named
    ]
    parts = parse(PythonicParser, f"[{', '.join(texts)}]")
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    arguments = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
    assert list(zip(names, arguments, strict=True)) == named


def test_arguments_in_python_without_names() -> None:
    tools = {"f": {"properties": {"a": {}, "b": {}}}}
    assert parsed(PythonicParser, tools, "[f(1, b=2)]") == call("f", '{"a": 1, "b": 2}')
    assert parsed(PythonicParser, tools, "[f(1, 2, 3)]") == [Text("[f(1, 2, 3)]")]


GRANITE_REASONING = [
    (
        "Here is my thought process: Hm.\n\nHere is my response:\n\nYes.",
        [Reasoning("Hm."), Text("Yes.")],
    ),
    ("Here is my thought process: Hm", [Reasoning("Hm")]),
    ("Here is my", [Text("Here is my")]),
    ("Here is what I think.", [Text("Here is what I think.")]),
]


@pytest.mark.parametrize(("text", "expected"), GRANITE_REASONING)
def test_reasoning_between_sentences(text: str, expected: list[Part]) -> None:
    thinking = GRANITE.thinking(is_open=False)
    check_cuts(lambda: OutputParser(ReasoningParser(thinking), None), text, expected)
