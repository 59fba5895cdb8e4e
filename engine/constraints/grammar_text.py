"""From a `GrammarPayload` to the text that llguidance compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.constraints.grammar_limits import (
    check_grammar,
    check_regex,
    parse_calls,
    parse_schema,
    parse_tags,
)
from engine.constraints.grammar_payload import (
    GrammarPayload,
    StructuralTags,
    TaggedValue,
    Thinking,
    ToolCalls,
    refused,
)
from engine.constraints.json_string_lark import in_json_string

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

ANY_WHITESPACE = r"[ \t\r\n]{1,16}"
"""Between parts of JSON, or nothing. Room for the indentation of pretty JSON; without a limit, a
model may write spaces for ever. A pattern that matches nothing, too, would make the parser follow
both ways: then 200 optional properties are beyond its limits."""


_MARK = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
"""What may be a special token in the texts that open and close thoughts."""
FindToken = Callable[[str], int | None]
"""The id of a special token by its name; None if no special token has the name."""


def grammar_text(grammar: GrammarPayload, special: FindToken) -> str:
    """The grammar in llguidance's form. Raises `RequestError` if it is beyond a limit or broken."""
    text = _text(grammar, special)
    if grammar.thinking is None:
        return text
    answer = "" if grammar.type == "tool_calls" else grammar.thinking.answer
    return _behind_thinking(text, grammar.thinking, answer, special)


def _text(grammar: GrammarPayload, special: FindToken) -> str:
    value = grammar.value
    if isinstance(value, list):
        # One lexeme: the lexer follows all the texts at once.
        lark = "start: CHOICE\nCHOICE: " + " | ".join(map(_literal, value))
        return LLMatcher.grammar_from_lark(lark)
    match grammar.type:
        case "json_schema":
            return _from_schema(json.dumps(parse_schema(value), ensure_ascii=False), grammar)
        case "json_object":
            return _from_schema('{"type": "object"}', grammar)
        case "structural_tag":
            return LLMatcher.grammar_from_lark(_lark_of_tags(parse_tags(value), grammar, special))
        case "tool_calls":
            return _text_of_calls(parse_calls(value), grammar, special)
        case "regex":
            check_regex(value)
            # "d": \\d is an ASCII digit, as other programs that check the output may have it.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(value, 'd')}/")
        case "gbnf":
            check_grammar(value)
            return LLMatcher.grammar_from_lark(_lark_of_gbnf(value))
        case _:
            check_grammar(value)
            return LLMatcher.grammar_from_lark(value)


def _json_options(grammar: GrammarPayload) -> JsonCompileOptions:
    options: JsonCompileOptions = {"whitespace_flexible": grammar.any_whitespace}
    if grammar.any_whitespace:
        options["whitespace_pattern"] = ANY_WHITESPACE
    if grammar.whitespace_pattern is not None:
        check_regex(grammar.whitespace_pattern)
        options["whitespace_pattern"] = grammar.whitespace_pattern
    return options


def _from_schema(schema: str, grammar: GrammarPayload) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(grammar))


def _lark_of_gbnf(text: str) -> str:
    try:
        lark: str = gbnf_to_lark(text)
    except RecursionError:
        raise refused("the grammar is nested too deeply") from None
    except Exception as error:  # llguidance's converter raises plain Exception
        raise refused(f"the grammar is neither Lark with a rule start nor GBNF: {error}") from None
    return lark


def _behind_thinking(text: str, thinking: Thinking, answer: str, special: FindToken) -> str:
    """The grammar `text`, with free text and `answer` before it."""
    inner = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    lines = [
        "%llguidance {}",
        "TEXT: /(.|\\n)*/",
        r"SPACE: /[ \t\r\n]{1,4}/",
        _head("think", thinking.end, special),
    ]
    if thinking.is_open:
        lines.append(f"start: think SPACE? {_marked(answer, special)} @inner")
    else:
        begin = _marked(thinking.start, special)
        lines.append(f"start: (SPACE? {begin} think SPACE?)? {_marked(answer, special)} @inner")
    inner[0]["name"] = "inner"
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *inner]})


def _text_of_calls(calls: ToolCalls, grammar: GrammarPayload, special: FindToken) -> str:
    text = LLMatcher.grammar_from_lark(_lark_of_calls(calls, grammar, special))
    named = [
        {"name": f"text_{number}", "lark_grammar": in_json_string(call.lark)}
        for number, call in enumerate(calls.calls)
        if call.lark
    ]
    return json.dumps({"grammars": [{"lark_grammar": text}, *named]}) if named else text


def _lark_of_calls(calls: ToolCalls, grammar: GrammarPayload, special: FindToken) -> str:
    """At least one group of calls; with `may_answer` free text around the groups, or alone."""

    def written(text: str) -> str:
        return _written(text, calls.words, special)

    lines = ["%llguidance {}", "TEXT: /(.|\\n)*/"]
    rules = []
    texts = _FreeTexts(special)
    for number, call in enumerate(calls.calls):
        rules.append(f"call_{number}")
        if call.values is not None:
            inner = ""
            for index, value in enumerate(call.values):
                rule = f"value_{number}_{index}"
                said = _said(value, grammar, texts, special)
                lines.append(f"{rule}: {_marked(value.begin, special)} {said}")
                inner += f"{rule}? " if value.is_optional else f"{rule} "
        else:
            inner = f"@text_{number}" if call.lark else _json_rule(call.schema, grammar)
        lines.append(f"call_{number}: {written(call.begin)} {inner} {written(call.end)}")
    lines += texts.lines
    lines.append(f"call: {' | '.join(rules)}")
    several = ""
    if calls.parallel and calls.separator is not None:
        several = f"({written(calls.separator)} call)*"
    lines.append(f"calls: {written(calls.opening)} call {several} {written(calls.closing)}")
    repeated = calls.parallel and calls.between is not None
    answer = "" if grammar.thinking is None else _marked(grammar.thinking.answer, special)
    if not calls.may_answer or calls.answer is not None or answer:
        group = f"{written(calls.marker)} calls"
        more = f"({written(calls.between or '')} {group})*" if repeated else ""
        lines.append(f"groups: {group} {more}")
    if not calls.may_answer:
        lines.append("start: groups")
    elif calls.answer is not None:
        lines.append(f"start: groups | {answer} answer")
        lines.append(f"answer: {_json_rule(calls.answer, grammar)}")
    elif answer:
        lines.append(f"start: groups | {answer} TEXT")
    elif calls.marker:
        lines.append(_head("head", calls.marker, special))
        lines.append(f"start: (head calls){'*' if repeated else '?'} TEXT")
    else:
        lines.append(r"ANSWER: /[ \t\r\n]*[^ \t\r\n{](.|\n)*/")
        lines.append("start: ANSWER | calls")
    return "\n".join(lines)


class _FreeTexts:
    """Rules of free texts up to a word, each once."""

    def __init__(self, special: FindToken) -> None:
        self._special = special
        self._rules: dict[tuple[str, int | None], str] = {}
        self.lines: list[str] = []

    def rule(self, end: str, max_length: int | None) -> str:
        """The name of the rule of a text up to `end`, of at most `max_length` characters."""
        key = end, max_length
        if key not in self._rules:
            name = self._rules[key] = f"free_{len(self._rules)}"
            text = "TEXT"
            if max_length is not None:
                text = f"TEXT_{max_length}"
                self.lines.append(f"{text}: /(.|\\n){{0,{max_length}}}/")
            self.lines.append(_head(name, end, self._special, text))
        return self._rules[key]


def _said(
    value: TaggedValue, grammar: GrammarPayload, texts: _FreeTexts, special: FindToken
) -> str:
    """A value, and the text behind it."""
    end = _marked(value.end, special)
    if value.choices:
        return f"({' | '.join(map(_literal, value.choices))}) {end}"
    if value.schema is not None:
        said = _json_rule(value.schema, grammar)
    else:
        said = texts.rule(value.text_end, value.max_length)
    return f"{said} {end}"


def _head(name: str, word: str, special: FindToken, text: str = "TEXT") -> str:
    """The rule `name`: free text up to the first `word`, and the word. A lazy lexeme ends at the
    first one, so the free text never holds it. A special token is never part of a text."""
    marked = _marked(word, special)
    if marked.startswith("<"):
        return f"{name}: {text} {marked}"
    return f"{name}[lazy]: {text} {_literal(word)}"


def _marked(text: str, special: FindToken) -> str:
    """`text` in Lark; the special tokens in it are written as tokens."""
    return _written(text, _MARK.findall(text), special)


def _written(text: str, words: Iterable[str], special: FindToken) -> str:
    """`text` in Lark; those of `words` that are special tokens are written as tokens."""
    tokens = {word: token for word in words if (token := special(word)) is not None}
    if not tokens:
        return _literal(text)
    pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
    written = (f"<[{tokens[p]}]>" if p in tokens else _literal(p) for p in pieces)
    return " ".join(filter(None, written))


def _lark_of_tags(tags: StructuralTags, grammar: GrammarPayload, special: FindToken) -> str:
    """Free text, and after each trigger one of its structures (llguidance's syntax.md, "tool
    calling")."""
    lines = ["%llguidance {}", "", "TEXT: /(.|\\n)*/"]
    heads: dict[str, str] = {}
    rules = []
    for number, structure in enumerate(tags.structures):
        trigger = max(filter(structure.begin.startswith, tags.triggers), key=len)
        if trigger not in heads:
            head = heads[trigger] = f"head_{len(heads)}"
            lines.append(_head(head, trigger, special))
        parts = [
            heads[trigger],
            _literal(structure.begin.removeprefix(trigger)),
            _json_rule(structure.schema, grammar),
            _literal(structure.end),
        ]
        rules.append(f"tag_{number}")
        lines.append(f"tag_{number}: {' '.join(filter(None, parts))}")
    lines.append(f"start: ({' | '.join(rules)})* TEXT")
    return "\n".join(lines)


def _json_rule(schema: dict[str, Any], grammar: GrammarPayload) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _json_options(grammar)})}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
