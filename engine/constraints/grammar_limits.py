"""What a grammar may hold, counted before it is compiled.

Time and memory of a compilation grow with these numbers, and llguidance overflows its stack where
rules or references lead far down. What passes here compiles in at most the time that
docs/structured_output.md gives.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engine.constraints.grammar_payload import StructuralTags, ToolCalls, refused
from engine.constraints.schema_keywords import without_silent

MAX_DEPTH = 64
"""Nested brackets of a text, nested values of JSON."""
MAX_NODES = 20_000
"""Values in the JSON of a schema."""
MAX_DEFINITIONS = 500
"""Different targets of `$ref`, rules of a grammar."""
MAX_ALTERNATIVES = 10_000
"""Values of all enums of a schema, `|` of a grammar or a regular expression."""
MAX_STRUCTURES = 128

_REGEX_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.S)
_GRAMMAR_PART = re.compile(
    r"""//[^\n]*                      # comment of Lark
    | \#[^\n]*                        # comment of GBNF
    | "(?:\\.|[^"\\\n])*"             # literal
    | /(?P<regex>(?:\\.|[^/\\\n])+)/  # regular expression of Lark
    | \[\^?\]?(?:\\.|[^\]\\\n])*\]    # characters of GBNF; attributes of Lark
    | [(){}|]
    """,
    re.X | re.S,
)
_RULE = re.compile(r"^[ \t]*[?!]?[\w-]+[^\n:\"/]*:", re.M)


def parse_schema(text: str) -> dict[str, Any]:
    """The schema of a JSON text, with its limits checked. Raises `RequestError`."""
    schema = _decode(text, "the JSON schema", Any)
    if not isinstance(schema, dict):
        raise refused("a JSON schema must be an object")
    _check_schema(schema)
    return without_silent(schema)


def parse_tags(text: str) -> StructuralTags:
    """The structures of a JSON text, with their limits checked. Raises `RequestError`."""
    tags: StructuralTags = _decode(text, "structural_tag", StructuralTags)
    if not 0 < len(tags.structures) <= MAX_STRUCTURES or len(tags.triggers) > MAX_STRUCTURES:
        raise refused(f"structural_tag takes 1 to {MAX_STRUCTURES} structures and triggers")
    if not all(tags.triggers):
        raise refused("structural_tag: a trigger must not be empty")
    for structure in tags.structures:
        if not structure.begin.startswith(tuple(tags.triggers)):
            raise refused(
                f"structural_tag: {structure.begin[:100]!r} begins with none of the triggers"
            )
    _check_schema([structure.schema for structure in tags.structures])
    for structure in tags.structures:
        structure.schema = without_silent(structure.schema)
    return tags


def parse_calls(text: str) -> ToolCalls:
    """The calls of a JSON text, with their limits checked. Raises `RequestError`."""
    calls: ToolCalls = _decode(text, "tools", ToolCalls)
    if not 0 < len(calls.calls) <= MAX_STRUCTURES:
        raise refused(f"{len(calls.calls)} tools: 1 to {MAX_STRUCTURES} are allowed")
    for call in calls.calls:
        for value in call.values or ():
            if value.refers and value.schema is not None:
                value.schema = {**value.schema, **call.schema}
    values = [value for call in calls.calls for value in call.values or ()]
    schemas = [value.schema for value in values if value.schema is not None]
    _check_schema([calls.answer or {}, *(call.schema for call in calls.calls), *schemas])
    _at_most(sum(len(value.choices) for value in values), MAX_ALTERNATIVES, "enum values")
    for call in calls.calls:
        if call.lark:
            check_grammar(call.lark)
        call.schema = without_silent(call.schema)
    for value in values:
        value.schema = None if value.schema is None else without_silent(value.schema)
    calls.answer = None if calls.answer is None else without_silent(calls.answer)
    return calls


def _decode(text: str, what: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise refused(f"{what} is nested deeper than {MAX_DEPTH} levels") from None
    except msgspec.ValidationError as error:
        raise refused(f"{what}: {error}") from None
    except msgspec.DecodeError as error:
        raise refused(f"{what} isn't valid JSON: {error}") from None


def _check_schema(schema: Any) -> None:
    num_nodes = num_alternatives = 0
    targets: set[str] = set()
    level = [schema]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise refused(f"the JSON schema is nested deeper than {MAX_DEPTH} levels")
        num_nodes += len(level)
        below: list[Any] = []
        for value in level:
            if isinstance(value, list):
                below += value
            elif isinstance(value, dict):
                below += value.values()
                ref, enum = value.get("$ref"), value.get("enum")
                if isinstance(ref, str):
                    targets.add(ref)
                if isinstance(enum, list):
                    num_alternatives += len(enum)
        level = below
    _at_most(num_nodes, MAX_NODES, "JSON values in the schema")
    _at_most(num_alternatives, MAX_ALTERNATIVES, "enum values in the schema")
    _at_most(len(targets), MAX_DEFINITIONS, "different targets of $ref in the schema")


def check_regex(pattern: str) -> None:
    """Raise `RequestError` if a regular expression is beyond a limit."""
    depth = num_alternatives = 0
    for part in _REGEX_PART.finditer(pattern):
        char = part.group()
        depth += (char == "(") - (char == ")")
        num_alternatives += char == "|"
        if depth > MAX_DEPTH:
            raise refused(f"the regular expression has more than {MAX_DEPTH} nested parentheses")
    _at_most(num_alternatives, MAX_ALTERNATIVES, "alternatives in the regular expression")


def check_grammar(text: str) -> None:
    """Raise `RequestError` if a grammar in Lark or GBNF is beyond a limit."""
    _at_most(len(_RULE.findall(text)), MAX_DEFINITIONS, "rules in the grammar")
    depth = num_alternatives = 0
    for part in _GRAMMAR_PART.finditer(text):
        if part["regex"] is not None:
            check_regex(part["regex"])
            continue
        char = part.group()
        depth += (char in "({") - (char in ")}")
        num_alternatives += char == "|"
        if depth > MAX_DEPTH:
            raise refused(f"the grammar has more than {MAX_DEPTH} nested brackets")
    _at_most(num_alternatives, MAX_ALTERNATIVES, "alternatives in the grammar")


def _at_most(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise refused(f"{count} {what}: at most {limit} are allowed")
