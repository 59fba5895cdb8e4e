"""Constraints by what the output is to be: JSON, a match, one of several texts, ...

    SamplingParams(constraint=structured.json_schema({"type": "object", ...}))

Each function raises `RequestError` if its argument has a wrong type or size. What a grammar says
is checked when it is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.constraints.base import ConstraintSpec
from engine.constraints.grammar_payload import (
    GrammarPayload,
    Thinking,
    ToolCalls,
    parse_grammar,
    refused,
)

_LARK = re.compile(r"^[ \t]*(%llguidance\b|[?!]?start[ \t]*(\[[^\]]*\])?[ \t]*:(?!:))", re.M)
"""What grammars in Lark have and those in GBNF don't."""


def json_schema(
    schema: Mapping[str, Any] | str,
    *,
    any_whitespace: bool = True,
    whitespace_pattern: str | None = None,
) -> ConstraintSpec:
    """JSON that validates against `schema`, an object or its JSON text."""
    return _spec(GrammarPayload("json_schema", _json(schema), any_whitespace, whitespace_pattern))


def json_object(
    *, any_whitespace: bool = True, whitespace_pattern: str | None = None
) -> ConstraintSpec:
    """Any JSON object."""
    return _spec(GrammarPayload("json_object", "", any_whitespace, whitespace_pattern))


def regex(pattern: str) -> ConstraintSpec:
    """Text that `pattern` matches as a whole (syntax of Rust's regex crate)."""
    return _spec(GrammarPayload("regex", pattern))


def choice(texts: Sequence[str]) -> ConstraintSpec:
    """One of `texts`."""
    return _spec(GrammarPayload("choice", list(texts)))


def grammar(text: str) -> ConstraintSpec:
    """Text of a grammar: llguidance's Lark with a rule `start`, or GBNF with a rule `root`."""
    return _spec(GrammarPayload("lark" if _LARK.search(text) else "gbnf", text))


def structural_tag(
    tags: Mapping[str, Any] | str,
    *,
    any_whitespace: bool = True,
    whitespace_pattern: str | None = None,
) -> ConstraintSpec:
    """Free text with structures in it; `tags` is a `StructuralTags` as an object or JSON text."""
    return _spec(GrammarPayload("structural_tag", _json(tags), any_whitespace, whitespace_pattern))


def tool_calls(calls: ToolCalls) -> ConstraintSpec:
    """Calls of tools as a model writes them."""
    return _spec(GrammarPayload("tool_calls", _json(msgspec.to_builtins(calls))))


def after_thinking(spec: ConstraintSpec, thinking: Thinking) -> ConstraintSpec:
    """The same behind free text in which the model thinks."""
    payload = {**spec.payload, "thinking": msgspec.to_builtins(thinking)}
    parse_grammar(payload)
    return ConstraintSpec(spec.kind, payload)


def _json(value: Mapping[str, Any] | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise refused("the JSON is nested too deeply") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise refused(f"this can't be written as JSON: {error}") from None


def _spec(grammar: GrammarPayload) -> ConstraintSpec:
    payload = msgspec.to_builtins(grammar)
    parse_grammar(payload)
    return ConstraintSpec("grammar", payload)
