"""Grammars: whatever tokens are chosen from their masks, the output is what was asked for."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.constraints import AllOf, ConstraintSpec, TokenFilter, grammar_template, structured
from engine.constraints.grammar_compiler import GrammarCompiler
from engine.constraints.grammar_template import GrammarTemplate
from engine.errors import RequestError
from engine.grammars.model_compiler import tokenizer_json
from engine.tokenizer.tokenizer import Tokenizer
from tests.support.grammars import (
    EOS,
    MODEL,
    VOCAB,
    allowed,
    feed,
    small_compiler,
    small_tokenizer,
    start,
    text_of,
    walk,
)
from tests.support.random_schemas import check_json, random_schema
from tests.support.tiny_tokenizers import write_byte_level, write_sentencepiece

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string", "maxLength": 10}},
    "required": ["x", "name"],
    "additionalProperties": False,
}


# JSON


@pytest.mark.parametrize("seed", range(16))
def test_random_walks_through_random_schemas_validate(seed: int) -> None:
    """20 schemas a seed. Those that llguidance refuses don't count; there are few."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    while found["valid"] < 20:
        schema = random_schema(rng)
        try:
            constraint = start(structured.json_schema(schema))
        except RequestError as error:
            assert "oneOf" in error.message or "Unsatisfiable" in error.message, error.message
            found["refused"] += 1
            continue
        text = text_of(walk(constraint, rng))
        try:
            check_json(text, schema)
        except ValueError as error:
            pytest.fail(f"{json.dumps(schema)}\n{text!r}\n{error}")
        found["valid"] += 1
    assert found["refused"] < 5


@pytest.mark.parametrize("seed", range(10))
def test_any_json_object(seed: int) -> None:
    text = text_of(walk(start(structured.json_object()), random.Random(seed)))
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("space", "pattern"),
    [
        ({}, r"\s{0,16}"),
        ({"any_whitespace": False}, ""),
        ({"whitespace_pattern": r"[ ]{0,2}"}, " {0,2}"),
    ],
)
def test_whitespace_of_json(space: dict[str, Any], pattern: str) -> None:
    schema = {**POINT, "properties": {"x": {"type": "boolean"}, "name": {"const": "a"}}}
    shape = re.compile(
        pattern.join(["{", '"x"', ":", "(true|false)", ",", '"name"', ":", '"a"', "}"])
    )
    for seed in range(5):
        text = text_of(walk(start(structured.json_schema(schema, **space)), random.Random(seed)))
        assert shape.fullmatch(text), text


# Regular expressions, choices, grammars


@pytest.mark.parametrize(
    "pattern",
    [
        "abc",
        "^abc$",
        r"\d{3}-\d{4}",
        r"[A-Za-z_][A-Za-z0-9_]{0,8}",
        "(foo|bar)+(baz)?",
        r"(?i)hello",
        r"[^a-z]{2,5}",
        r".{1,4}/x",
        r"\w+@\w+\.(com|org)",
        "[àéü]{2}|你好?",
        r"(a|b)*abb",
        r"-?(0|[1-9]\d{0,4})(\.\d{1,3})?",
        r"\[\"\\]",
        "a{0,1000000}",
        "(a+)+b",
        r"[\s]x\n",
    ],
)
def test_regex_matches_the_whole_output(pattern: str) -> None:
    for seed in range(5):
        rng = random.Random(seed)
        text = text_of(walk(start(structured.regex(pattern)), rng, free=10, limit=500))
        assert re.fullmatch(pattern, text), text


def test_digits_are_ascii() -> None:
    for seed in range(20):
        text = text_of(walk(start(structured.regex(r"\d{8}")), random.Random(seed)))
        assert text.isascii() and text.isdigit()


CHOICES = ["yes", "no", "no way", "naïve", 'say "hi"', "two\nlines", "back\\slash", "a/b", "👍🏽"]


def test_every_choice_can_be_the_output_and_nothing_else() -> None:
    seen = {
        text_of(walk(start(structured.choice(CHOICES)), random.Random(seed))) for seed in range(150)
    }
    assert seen == set(CHOICES)


LIST_GBNF = r"""
# a list of sums
root ::= "[" sum ("," sum)* "]"
sum ::= number ("+" number)*
number ::= [1-9] [0-9]{0,2} | "0" | "(" sum ")"
"""
LIST_LARK = r"""
start: "[" sum ("," sum)* "]"
sum: NUMBER ("+" NUMBER | "+(" sum ")")*
NUMBER: /[1-9][0-9]{0,2}/ | "0"
"""


@pytest.mark.parametrize("grammar", [LIST_GBNF, LIST_LARK], ids=["gbnf", "lark"])
def test_grammars(grammar: str) -> None:
    for seed in range(10):
        text = text_of(walk(start(structured.grammar(grammar)), random.Random(seed)))
        assert all(isinstance(n, int) for n in eval(text)), text


def test_json_by_a_gbnf_grammar() -> None:
    grammar = r"""
root ::= value
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (string ":" value ("," string ":" value)*)? "}"
array ::= "[" (value ("," value)*)? "]"
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" hex hex hex hex))* "\""
hex ::= [0-9a-fA-F]
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
"""
    for seed in range(10):
        json.loads(text_of(walk(start(structured.grammar(grammar)), random.Random(seed))))


# Structural tags

TAGS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=point>", "schema": POINT, "end": "</f>"},
        {"begin": "<f=on>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "[[", "schema": {"type": "integer", "minimum": 0}, "end": "]]"},
    ],
    "triggers": ["<f=", "[["],
}


@pytest.mark.parametrize("seed", range(6))
def test_a_trigger_begins_a_structure(seed: int) -> None:
    constraint = start(structured.structural_tag(TAGS))
    rng = random.Random(seed)
    for before, begin in (("Hello, ", "<f=point>"), (" and\n", "<f=on>"), ("", "[[")):
        feed(constraint, before)
        assert set(EOS) <= set(allowed(constraint)), "free text may end"
        trigger = begin[: 3 if begin[0] == "<" else 2]
        feed(constraint, trigger)
        assert not set(EOS) & set(allowed(constraint)), "a structure must be finished"
        feed(constraint, begin[len(trigger) :])
        structure = next(s for s in TAGS["structures"] if s["begin"] == begin)  # type: ignore[index]
        text = structure_text(constraint, rng)
        value, end = json.JSONDecoder().raw_decode(text.lstrip())
        check_json(json.dumps(value), structure["schema"])
        assert text.lstrip()[end:].startswith(structure["end"])
    feed(constraint, " bye")
    assert constraint.accept(EOS[1]) and constraint.is_terminated


def structure_text(constraint: Any, rng: random.Random) -> str:
    """Random tokens up to where free text is allowed again."""
    out: list[int] = []
    while not (set(EOS) & set(allowed(constraint))):
        token = int(rng.choice(allowed(constraint)))
        assert constraint.accept(token)
        out.append(token)
        assert len(out) < 500
    return text_of(out)


def test_tags_may_trigger_on_a_special_token() -> None:
    tokenizer = json.loads(tokenizer_json(MODEL))
    special = next(t for t in tokenizer["added_tokens"] if t["special"] and t["id"] not in EOS)
    name, token = special["content"], special["id"]
    constraint = start(
        structured.structural_tag(
            {
                "structures": [{"begin": name, "schema": {"const": 7}, "end": "."}],
                "triggers": [name],
            }
        )
    )
    feed(constraint, "text")
    assert token in allowed(constraint)
    assert constraint.accept(token)
    feed(constraint, "7.")
    assert constraint.accept(EOS[0])


# The end of the output


def test_end_of_sequence_tokens_where_the_output_may_end() -> None:
    constraint = start(structured.regex("ab*"))
    assert not set(EOS) & set(allowed(constraint))
    assert not constraint.accept(EOS[0])
    feed(constraint, "ab")
    assert set(EOS) <= set(allowed(constraint))
    assert not constraint.is_terminated
    assert constraint.accept(EOS[1]) and constraint.is_terminated
    assert not len(allowed(constraint)) and not constraint.accept(EOS[0])
    constraint = start(structured.regex("ab"))
    feed(constraint, "ab")
    assert not constraint.is_terminated and set(allowed(constraint)) == set(EOS)


def test_without_end_of_sequence_tokens_it_ends_where_nothing_may_follow() -> None:
    constraint = start(structured.regex("ab?"), eos=())
    feed(constraint, "a")
    assert not constraint.is_terminated
    assert not set(EOS) & set(allowed(constraint)) and not constraint.accept(EOS[0])
    feed(constraint, "b")
    assert constraint.is_terminated
    for seed in range(5):
        constraint = start(structured.json_schema(POINT), eos=())
        check_json(text_of(walk(constraint, random.Random(seed))), POINT)
    one = start(structured.regex("ab*"), eos=(EOS[0],))
    feed(one, "ab")
    assert {EOS[0]} == set(allowed(one)) & set(EOS) and not one.accept(EOS[1])


def test_refused_tokens_change_nothing() -> None:
    constraint = start(structured.regex("[a-z]{3,30}[0-9]"))
    rng = random.Random(0)
    for token in walk(start(structured.regex("[a-z]{3,30}[0-9]")), rng):
        may = set(allowed(constraint))
        for wrong in rng.sample(sorted(set(range(VOCAB)) - may), 20):
            assert not constraint.accept(wrong)
        assert set(allowed(constraint)) == may
        assert constraint.accept(token)


def test_forced_text_is_written_in_the_tokenizers_own_tokens() -> None:
    """Other tokens of the same text are accepted (a resumed output may have them), not offered."""
    constraint = start(structured.choice(["hello world"]))
    own = small_tokenizer().encode("hello world", add_special_tokens=False)
    for token in own:
        assert allowed(constraint).tolist() == [token]
        assert constraint.accept(token)
    letters = start(structured.choice(["hello world"]))
    for char in "hello world":
        feed(letters, char)
    assert set(allowed(letters)) == set(EOS)


# Vocabularies


@pytest.mark.parametrize("vocab", [4000, 4031, 4095, 4097, 4100, 5000])
def test_vocabulary_of_the_model_may_differ_from_the_tokenizers(vocab: int) -> None:
    """A model's has padding, mostly; a tokenizer may have tokens that the model never got."""
    compiler = GrammarCompiler(lambda: tokenizer_json(MODEL), vocab, EOS)
    usual = start(structured.regex("(.|\n)*"))
    constraint = start(structured.regex("(.|\n)*"), compiler=compiler, vocab=vocab)
    for text in ("Hello", " wörld\n", "{"):
        may = set(allowed(constraint, vocab))
        assert max(may) < min(vocab, VOCAB)
        assert may == {t for t in allowed(usual) if t < vocab}
        feed(constraint, text)
        feed(usual, text)


@pytest.mark.parametrize("write", [write_byte_level, write_sentencepiece])
def test_kinds_of_tokenizers(write: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    tokenizer = Tokenizer.from_pretrained(folder)
    eos = tokenizer.eos_token_id
    assert eos is not None
    vocab = tokenizer.vocab_size + 10
    compiler = GrammarCompiler(lambda: tokenizer_json(folder), vocab, [eos])
    schema = {
        **POINT,
        "properties": {**POINT["properties"], "name": {"enum": ["naïve 你好", "a b"]}},
    }  # type: ignore[dict-item]
    for seed in range(10):
        rng = random.Random(seed)
        constraint = start(structured.json_schema(schema), (eos,), vocab, compiler)
        out: list[int] = []
        while not constraint.is_terminated:
            ids = allowed(constraint, vocab)
            token = eos if eos in ids else int(rng.choice(ids))
            assert constraint.accept(token)
            out.append(token)
        check_json(tokenizer.decode(out[:-1], skip_special_tokens=False), schema)


def test_without_a_tokenizer_grammars_are_refused() -> None:
    with pytest.raises(RequestError, match="tokenizer") as refused:
        start(structured.regex("a"), compiler=None)
    assert (refused.value.param, refused.value.status) == ("constraint", 400)


def test_model_without_end_of_sequence_tokens() -> None:
    compiler = GrammarCompiler(lambda: tokenizer_json(MODEL), VOCAB, ())
    constraint = start(structured.regex("ab?"), eos=(), compiler=compiler)
    feed(constraint, "a")
    assert [text_of([int(t)]) for t in allowed(constraint)] == ["b"]


# Copies and the cache


def test_copies_are_independent() -> None:
    spec = structured.regex("(ab|cd)*e")
    first, second = start(spec), start(spec)
    feed(first, "ab")
    before = set(allowed(second))
    feed(first, "cde")
    assert set(allowed(second)) == before
    feed(second, "e")
    assert set(allowed(second)) == set(EOS)


def test_templates_are_compiled_once_and_kept_within_bounds() -> None:
    compiler = GrammarCompiler(lambda: tokenizer_json(MODEL), VOCAB, EOS, max_cache_bytes=2**20)
    payloads = [structured.regex(f"a{{{i}}}").payload for i in range(1, 21)]
    made = [compiler.template(payload) for payload in payloads]
    assert len(compiler.cache) < 20 and compiler.cache.num_bytes <= 2**20
    assert compiler.template(payloads[-1]) is made[-1]
    assert compiler.template(payloads[0]) is not made[0]
    made[-1].searched_s = 1e9  # its lexer has grown
    assert compiler.cache.num_bytes > 2**20
    compiler.template(payloads[5])
    assert compiler.cache.num_bytes <= 2**20


def test_errors_are_kept_too() -> None:
    compiler = GrammarCompiler(lambda: tokenizer_json(MODEL), VOCAB, EOS)
    payload = structured.regex("(a").payload
    for _ in range(2):
        with pytest.raises(RequestError, match="unclosed group"):
            compiler.template(payload)
    assert len(compiler.cache) == 1


def test_prepare_compiles_beside_its_caller() -> None:
    compiler = GrammarCompiler(lambda: tokenizer_json(MODEL), VOCAB, EOS)
    payload = structured.json_schema(POINT).payload
    future = compiler.prepare(payload)
    assert future is not None
    assert future.result() is compiler.template(payload)
    assert compiler.prepare(payload) is None


# What is refused


def chain(count: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "null"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def spec(kind: str, value: Any, **more: Any) -> ConstraintSpec:
    return ConstraintSpec("grammar", {"type": kind, "value": value, **more})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (spec("xml", "a"), "Invalid enum value 'xml'"),
        (ConstraintSpec("grammar", {"value": "a"}), "missing required field `type`"),
        (spec("regex", "a", flags=1), "unknown field `flags`"),
        (spec("regex", ["a"]), "type regex needs a string"),
        (spec("choice", "a"), "type choice needs a list of strings"),
        (spec("choice", []), "choice takes 1 to 10000 strings"),
        (spec("choice", ["a", ""]), "none of them empty"),
        (spec("choice", ["a"] * 10_001), "choice takes 1 to 10000"),
        (spec("regex", ""), "must not be empty"),
        (spec("regex", "a" * 65_537), "65537 bytes; at most 65536"),
        (spec("regex", "\ud800"), "surrogate"),
        (spec("regex", "a", any_whitespace=False), "whitespace options are only for JSON"),
        (spec("json_object", "", whitespace_pattern=" " * 257), "at most 256 characters"),
        (spec("json_object", "", whitespace_pattern="(" * 100), "64 nested parentheses"),
        (spec("json_schema", '{"type":'), "isn't valid JSON"),
        (spec("json_schema", "[1]"), "must be an object"),
        (structured.json_schema(nested(100)), "nested deeper than 64"),
        (spec("json_schema", '{"items":' * 7000), "(nested deeper than 64|isn't valid JSON)"),
        (structured.json_schema(chain(600)), "601 different targets of \\$ref"),
        (structured.json_schema({"enum": list(range(10_001))}), "10001 enum values"),
        (structured.json_schema({"enum": [[0] * 100] * 210}), "JSON values in the schema"),
        (structured.json_schema({"$ref": "http://127.0.0.1:9/x"}), "retrieving it failed"),
        (structured.json_schema({"$ref": "#"}), "allows no output"),
        (structured.json_schema({"type": "strng"}), "Invalid type: strng"),
        (structured.json_schema({"not": {"type": "null"}}), 'Unimplemented keys: \\["not"\\]'),
        (structured.json_schema({"uniqueItems": True}), "uniqueItems"),
        (structured.json_schema({"type": "string", "format": "x"}), "Unknown format: x"),
        (structured.regex("(a"), "unclosed group"),
        (structured.regex("a(?=b)"), "look-around"),
        (structured.regex(r"(a)\1"), "backreferences"),
        (structured.regex("(" * 65 + ")" * 65), "more than 64 nested parentheses"),
        (structured.regex("|" * 10_001), "10001 alternatives"),
        (structured.grammar("start: a"), "unknown name"),
        (structured.grammar("root ::= a"), "'a' not found"),
        (structured.grammar("hello"), "neither Lark with a rule start nor GBNF"),
        (structured.grammar("start: " + "(" * 65 + '"a"' + ")" * 65), "nested brackets"),
        (structured.grammar("\n".join(f'r{i}: "a"' for i in range(501))), "501 rules"),
        (structured.structural_tag("{}"), "missing required field `structures`"),
        (structured.structural_tag({"structures": [], "triggers": ["a"]}), "takes 1 to 128"),
        (
            structured.structural_tag(
                {"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["a"]}
            ),
            "'x' begins with none of the triggers",
        ),
    ],
)
def test_wrong_grammars_are_refused_in_words(wrong: ConstraintSpec, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        start(wrong)
    assert (refused.value.param, refused.value.status) == ("constraint", 400)
    assert len(refused.value.message) < 500


@pytest.mark.parametrize("make", [structured.json_schema, structured.structural_tag])
def test_what_isnt_json_is_refused_in_words(make: Any) -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for wrong in (deep, {"a": object()}):
        with pytest.raises(RequestError):
            make(wrong)


# At run time


def test_a_grammar_beyond_the_limits_of_a_step_is_an_error_and_no_output() -> None:
    constraint = start(structured.regex("((a{0,1000}){0,1000}){0,1000}"))
    rng = random.Random(0)
    while not constraint.error:
        ids = allowed(constraint)
        if not len(ids):
            break
        constraint.accept(int(rng.choice([t for t in ids if t not in EOS])))
    assert "the grammar is too complex" in constraint.error
    assert not len(allowed(constraint)) and not constraint.is_terminated
    both = AllOf([TokenFilter(VOCAB, None, []), constraint], VOCAB)
    assert both.error == constraint.error


def test_a_grammar_that_holds_up_the_others_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all its requests together, however many there are."""
    monkeypatch.setattr(grammar_template, "FREE_S_PER_TOKEN", 0.0001)
    compiler = GrammarCompiler(lambda: tokenizer_json(MODEL), VOCAB, EOS)
    spec = structured.grammar('start: s\ns: s s s | s s | "a"\n')
    copies = [start(spec, compiler=compiler) for _ in range(30)]
    template = compiler.template(spec.payload)
    for _ in range(100):
        for constraint in copies:
            if not constraint.error:
                ids = [t for t in allowed(constraint) if t not in EOS]
                if ids:
                    constraint.accept(min(ids))
        if all(constraint.error for constraint in copies):
            break
    assert all(constraint.error for constraint in copies)
    assert template.spent_s < 1.0
    assert any("takes too long" in constraint.error for constraint in copies)
    with pytest.raises(RequestError, match="takes too long"):
        start(spec, compiler=compiler)


def test_usual_grammars_are_far_from_too_slow() -> None:
    template = small_compiler().template(structured.json_schema(POINT).payload)
    assert isinstance(template, GrammarTemplate)
    for seed in range(20):
        walk(start(structured.json_schema(POINT)), random.Random(seed))
    assert template.num_tokens > 100
    assert template.spent_s < 0.001 * template.num_tokens and not template.is_too_slow


def test_hundreds_of_optional_properties_are_within_the_limits() -> None:
    names = {f"property_{i}": {"type": "string"} for i in range(400)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    for seed in range(3):
        text = text_of(walk(start(structured.json_schema(schema)), random.Random(seed)))
        check_json(text, schema)


def test_masks_equal_what_may_be_accepted() -> None:
    """Every token, at the first states of some outputs."""
    rng = random.Random(1)
    for given in (structured.regex("(ab|ac){1,2}[xyz]?"), structured.regex("[a-c]{1,9}|x.*")):
        out: list[int] = []
        for _ in range(3):
            constraint = replay(given, out)
            may = set(allowed(constraint))
            for token in range(VOCAB):
                assert replay(given, out).accept(token) == (token in may)
            rest = sorted(may - set(EOS))
            if not rest:
                break
            out.append(int(rng.choice(rest)))


def replay(given: ConstraintSpec, tokens: list[int]) -> Any:
    constraint = start(given)
    assert all(constraint.accept(token) for token in tokens)
    return constraint


def test_a_mask_is_written_into_the_row_given() -> None:
    masks = np.full((3, VOCAB // 32), 0xDEADBEEF, np.uint32)
    start(structured.regex("a")).fill_mask(masks[1])
    assert (masks[[0, 2]] == 0xDEADBEEF).all() and 0 < (masks[1] != 0).sum() < 5


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    from engine.errors import ConfigError

    with pytest.raises(ConfigError, match="tokenizer"):
        tokenizer_json(tmp_path)


TEXT, TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
SILENT: list[dict[str, Any]] = [
    {**TEXTS, "uniqueItems": False},
    {**TEXTS, "minItems": 1.0, "maxItems": 2.0},
    {**TEXTS, "minContains": 1, "maxContains": 2},
    {**TEXTS, "contains": {"const": 1}, "minContains": 0},
    {**TEXTS, "unevaluatedItems": True},
    {**TEXT, "minLength": 1.0, "maxLength": 1e1},
    {**TEXT, "not": False},
    {**TEXT, "then": {"const": 1}, "else": {}},
    {**TEXT, "if": {"const": "a"}},
    {**TEXT, "if": {"const": "a"}, "then": {}, "else": True},
    {"type": "object", "minProperties": 0.0, "required": [], "dependentRequired": {}},
    {"type": "object", "propertyNames": TEXT, "dependentSchemas": {}, "dependencies": {}},
    {"type": "object", "propertyNames": {}, "unevaluatedProperties": {}},
    {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {**TEXTS, "uniqueItems": False}}},
    {"type": "object", "properties": {"a": {**TEXT, "minLength": 1.0, "default": "x"}}},
    {"type": "array", "prefixItems": [{**TEXTS, "uniqueItems": False}]},
]


@pytest.mark.parametrize("schema", SILENT, ids=str)
def test_keywords_that_say_nothing_are_taken(schema: dict[str, Any]) -> None:
    start(structured.json_schema(schema))
    structure = {"begin": "<a>", "schema": schema, "end": ""}
    start(structured.structural_tag({"structures": [structure], "triggers": ["<a"]}))


@pytest.mark.parametrize(
    "schema",
    [
        {**TEXTS, "uniqueItems": True},
        {**TEXTS, "uniqueItems": 0},
        {**TEXT, "minLength": 1.5},
        {**TEXTS, "contains": {"const": "a"}},
        {**TEXT, "if": {"const": "a"}, "then": False},
        {"type": "object", "properties": {"a": {**TEXTS, "uniqueItems": True}}},
    ],
    ids=str,
)
def test_those_that_say_something_are_not(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        start(structured.json_schema(schema))


def test_names_and_values_that_look_like_keywords_stay() -> None:
    schema = {
        "type": "object",
        "properties": {"uniqueItems": {"const": {"minLength": 1.5, "not": False}}},
        "required": ["uniqueItems"],
        "additionalProperties": False,
    }
    constraint = start(structured.json_schema(schema))
    for token in small_tokenizer().encode(
        '{"uniqueItems":{"minLength":1.5,"not":false}}', add_special_tokens=False
    ):
        assert constraint.accept(token)
