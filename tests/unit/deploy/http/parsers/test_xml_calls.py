"""Calls whose arguments stand between tags: cut anywhere, typed by the tool's schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.http.parsers.argument_text import json_of, json_types
from deploy.http.parsers.output_parser import OutputParser
from deploy.http.parsers.parts import CallArguments, CallBegin, Part, Text
from deploy.http.parsers.tool_parser import ToolParser
from deploy.http.parsers.xml_calls import Glm45Parser, MiniMaxM2Parser, Qwen3CoderParser, XmlParser
from tests.unit.deploy.http.parsers.parsing import call, check_cuts, parsed
from tests.unit.deploy.http.parsers.tags import grouped, tagged, written

KINDS: list[type[XmlParser]] = [Qwen3CoderParser, Glm45Parser, MiniMaxM2Parser]
TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "n": {"type": "integer"},
            "list": {"type": "array"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
            "named": {"$ref": "#/$defs/name"},
            "other": {},
            "loop": {"$ref": "#/$defs/loop"},
        },
        "$defs": {
            "name": {"enum": ["1", "2"]},
            "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]},
        },
    },
    "get-weather": {},
}


def check(kind: type[ToolParser], text: str, expected: list[Part]) -> None:
    check_cuts(lambda: OutputParser(None, kind(TOOLS), None), text, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_cut_anywhere(kind: type[XmlParser]) -> None:
    one = written(kind, ("f", {"text": "é <b>\n\t3", "n": "5"}))
    both = written(kind, ("f", {"n": "5"}), ("get-weather", {}))
    first = call("f", '{"text": "é <b>\\n\\t3", "n": 5}')
    check(kind, one, first)
    check(kind, f"Well.\n{one}\nDone.", [Text("Well."), *first, Text("\nDone.")])
    check(kind, both, [*call("f", '{"n": 5}'), *call("get-weather", "{}", 1)])
    check(kind, f"{both}\n", [*call("f", '{"n": 5}'), *call("get-weather", "{}", 1)])
    check(kind, written(kind, ("unknown", {"a": "x"})), call("unknown", '{"a": "x"}'))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("text", "5", '"5"'),
        ("text", "", '""'),
        ("text", '{"a": "\\n"}', '"{\\"a\\": \\"\\\\n\\"}"'),
        ("text", "a</tool_call></function>b", '"a</tool_call></function>b"'),
        ("n", " 5 ", "5"),
        ("n", "12345678901234567890", "12345678901234567890"),
        ("n", "five", '"five"'),
        ("n", "NaN", '"NaN"'),
        ("list", '[1, {"a": "<x>"}]', '[1, {"a": "<x>"}]'),
        ("list", "['a', True, None]", '["a", true, null]'),
        ("list", "[1,", '"[1,"'),
        ("maybe", "null", "null"),
        ("maybe", "5", '"5"'),
        ("either", "5", "5"),
        ("either", "5.5", '"5.5"'),
        ("either", '"5"', '"\\"5\\""'),
        ("named", "2", '"2"'),
        ("other", "5", "5"),
        ("other", "five", '"five"'),
        ("other", '"5"', '"5"'),
        ("other", "1_000", '"1_000"'),
        ("loop", "5", '"5"'),
        ("unknown", "true", "true"),
        ("unknown", "{'a': {1, 2}}", "\"{'a': {1, 2}}\""),
    ],
)
def test_values_have_the_types_of_the_schema(
    kind: type[XmlParser], key: str, value: str, read: str
) -> None:
    expected = call("f", f'{{"{key}": {read}}}')
    check(kind, written(kind, ("f", {key: value})), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_tags_within_a_value(kind: type[XmlParser]) -> None:
    tag = kind.form.value_end
    value = f"a{tag}b\n{tag}\n{tag[:-1]} {tag}"
    text = written(kind, ("f", {"text": value, "n": "1"}))
    check(kind, text, call("f", json.dumps({"text": value, "n": 1})))


def test_line_ends_of_a_value_on_lines_of_its_own() -> None:
    text = written(Qwen3CoderParser, ("f", {"text": "\n a\n\n"}))
    check(Qwen3CoderParser, text, call("f", '{"text": "\\n a\\n\\n"}'))
    short = "<tool_call><function=f><parameter=text>a</parameter></function></tool_call>"
    check(Qwen3CoderParser, short, call("f", '{"text": "a"}'))


def test_a_call_without_marker() -> None:
    bare = tagged(Qwen3CoderParser, "f", {"n": "1"})
    expected = call("f", '{"n": 1}')
    check(Qwen3CoderParser, bare, expected)
    check(Qwen3CoderParser, f"Ok. {bare}\n</tool_call>", [Text("Ok."), *expected])
    check(Qwen3CoderParser, f"{bare}\n{bare}", [*expected, *call("f", '{"n": 1}', 1)])


def test_a_call_without_line_ends() -> None:
    text = "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>"
    check(Glm45Parser, text, call("f", '{"n": 1}'))
    check(Glm45Parser, "<tool_call>f</tool_call>", call("f", "{}"))


@pytest.mark.parametrize("kind", KINDS)
def test_calls_as_json(kind: type[XmlParser]) -> None:
    text = '{"name": "f", "arguments": {"maybe": "x"}}'
    check(kind, grouped(kind, [text]), call("f", '{"maybe": "x"}'))


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_ends_anywhere(kind: type[XmlParser]) -> None:
    """What came of the arguments is a beginning of the whole ones, and no tag is left over."""
    text = written(kind, ("f", {"text": "one\ntwo", "list": "[1]", "n": "5"}))
    whole = '{"text": "one\\ntwo", "list": [1], "n": 5}'
    begun = 0
    for end in range(len(text)):
        parts = parsed(kind, TOOLS, text[:end])
        parser = kind(TOOLS)
        parser.feed(text[:end])
        parser.finish()
        if not parts or isinstance(parts[0], Text):
            assert parts in ([], [Text(text[:end])]) and not begun
            continue
        begun += 1
        assert parts[0] == CallBegin(0, "f")
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
        assert whole.startswith(arguments) and not any(isinstance(part, Text) for part in parts)
        assert parser.is_cut == (arguments != whole)
    assert begun > 40


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((kind, f"a {kind.marker} no pe {kind.closing}\n") for kind in KINDS),
        *((kind, f"{kind.marker}") for kind in KINDS),
        *((kind, kind.marker[:5]) for kind in KINDS),
        (Qwen3CoderParser, "<tool_call>\n<function=f"),
        (Qwen3CoderParser, "<tool_call>\n<function=f> then</function>\n</tool_call>"),
        (Qwen3CoderParser, "<tool_call><function=>\n</function></tool_call>"),
        (Qwen3CoderParser, "A <function=f is it."),
        (Glm45Parser, "<tool_call>get_wea"),
        (Glm45Parser, "<tool_call>f\nthen</tool_call>"),
        (MiniMaxM2Parser, '<minimax:tool_call>\n<invoke name="f'),
        (MiniMaxM2Parser, "<minimax:tool_call>\n<invoke>\n</invoke>\n</minimax:tool_call>"),
    ],
)
def test_what_is_no_call_stays_text(kind: type[XmlParser], text: str) -> None:
    check(kind, text, [Text(text)])


@pytest.mark.parametrize(
    ("kind", "text", "rest"),
    [
        (Glm45Parser, "<tool_call>f\n<arg_key>n</arg_key> 5</tool_call>", "<arg_key>n</arg_key> 5"),
        (
            Glm45Parser,
            "<tool_call>f\n<arg_key>n</arg_key>\n<value>5</value></tool_call> Ok",
            "<arg_key>n</arg_key>\n<value>5</value> Ok",
        ),
    ],
)
def test_what_follows_a_broken_key_is_text(kind: type[XmlParser], text: str, rest: str) -> None:
    check(kind, text, [*call("f", "{}"), Text(rest)])


VALUES = st.text(st.sampled_from("a\n <>/=\"'\\é{[") | st.characters(codec="utf-8"), max_size=12)
WORDS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "</function>",
            "<parameter=",
            "</parameter>",
        ),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>"),
        *("</minimax:tool_call>", '<invoke name="', "</invoke>", '<parameter name="', '">', ">"),
        *("f", "n", "text", "1", "\n", " ", "{", '{"name": "f", "arguments": {}}', "é"),
    ]
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(values=st.dictionaries(st.sampled_from(["text", "maybe", "x"]), VALUES, max_size=3))
def test_any_string_comes_back(kind: type[XmlParser], values: dict[str, str]) -> None:
    tools = {"f": {"properties": {key: {"type": "string"} for key in ("text", "maybe", "x")}}}
    text = written(kind, ("f", values))
    for cuts in ([], list(range(len(text)))):
        begin, arguments = parsed(kind, tools, text, cuts)
        assert begin == CallBegin(0, "f") and isinstance(arguments, CallArguments)
        assert json.loads(arguments.text) == values


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300)
@given(words=st.lists(WORDS, max_size=16), cuts=st.lists(st.integers(0, 80), max_size=10))
def test_any_text_cut_anywhere(kind: type[XmlParser], words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    whole = parsed(kind, TOOLS, text)
    assert parsed(kind, TOOLS, text, [cut for cut in cuts if cut <= len(text)]) == whole
    assert parsed(kind, TOOLS, text, list(range(len(text)))) == whole
    if not any(isinstance(part, CallBegin) for part in whole):
        assert "".join(part.text for part in whole if isinstance(part, Text)) == text


def test_schemas_whose_branches_multiply() -> None:
    """Each of eight definitions has a hundred branches that refer to the next one."""
    definitions: dict[str, Any] = {
        f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 100} for level in range(8)
    }
    root = {
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "$defs": {**definitions, "d8": {"type": "string"}},
    }
    assert json_types(root["properties"]["a"], root) == {"string"}
    wide = {"anyOf": [{"type": "string"}] * 101}
    assert json_types(wide, wide) is None
    assert json_of("5", wide, wide) == "5"
