"""From a `GrammarPayload` to the text that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.constraints.grammar_limits import (
    check_grammar,
    check_regex,
    parse_schema,
    parse_tags,
)
from engine.constraints.grammar_payload import GrammarPayload, StructuralTags, refused

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

ANY_WHITESPACE = r"[ \t\r\n]{1,16}"
"""Between parts of JSON, or nothing. Room for the indentation of pretty JSON; without a limit, a
model may write spaces for ever. A pattern that matches nothing, too, would make the parser follow
both ways: then 200 optional properties are beyond its limits."""


def grammar_text(grammar: GrammarPayload, is_special: Callable[[str], bool]) -> str:
    """The grammar in llguidance's form. Raises `RequestError` if it is beyond a limit or broken.

    `is_special` says whether a text is the name of one of the tokenizer's special tokens.
    """
    value = grammar.value
    if isinstance(value, list):
        # One lexeme: the lexer follows all the texts at once.
        lark = "start: CHOICE\nCHOICE: " + " | ".join(map(_literal, value))
        return LLMatcher.grammar_from_lark(lark)
    match grammar.type:
        case "json_schema":
            parse_schema(value)
            return _from_schema(value, grammar)
        case "json_object":
            return _from_schema('{"type": "object"}', grammar)
        case "structural_tag":
            return LLMatcher.grammar_from_lark(
                _lark_of_tags(parse_tags(value), grammar, is_special)
            )
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


def _lark_of_tags(
    tags: StructuralTags, grammar: GrammarPayload, is_special: Callable[[str], bool]
) -> str:
    """Free text, and after each trigger one of its structures (llguidance's syntax.md, "tool
    calling"). A lazy lexeme ends at the first trigger, so free text never holds one."""
    lines = ["%llguidance {}", "", "TEXT: /(.|\\n)*/"]
    heads: dict[str, str] = {}
    rules = []
    for number, structure in enumerate(tags.structures):
        trigger = max(filter(structure.begin.startswith, tags.triggers), key=len)
        if trigger not in heads:
            head = heads[trigger] = f"head_{len(heads)}"
            if is_special(trigger):
                lines.append(f"{head}: TEXT {trigger}")
            else:
                lines.append(f"{head}[lazy]: TEXT {_literal(trigger)}")
        schema = {**structure.schema, "x-guidance": _json_options(grammar)}
        parts = [
            heads[trigger],
            _literal(structure.begin.removeprefix(trigger)),
            f"%json {json.dumps(schema)}",
            _literal(structure.end),
        ]
        rules.append(f"tag_{number}")
        lines.append(f"tag_{number}: {' '.join(filter(None, parts))}")
    lines.append(f"start: ({' | '.join(rules)})* TEXT")
    return "\n".join(lines)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
