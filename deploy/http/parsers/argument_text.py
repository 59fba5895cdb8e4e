"""Arguments that are written without JSON's quotes: the tool's schema says what a text means."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

ONLY_TEXT = frozenset(("string",))
"""The types of a value that is a string in any case."""
_MAX_REFERENCES = 8
"""References that are followed one behind the other."""
_MAX_BRANCHES = 100
"""Schemas that are looked at to tell a value's types."""
_LENGTHS = range(1001)
"""Values of `maxLength` that a plain text may have, in characters."""
_ANNOTATIONS = frozenset(
    ("type", "title", "description", "default", "examples", "deprecated", "$comment")
)
"""Keys that say nothing about a text beside its type."""
_TYPE_OF: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


_PYTHON_NAMES = ("True", "False", "None")


class FreeText(NamedTuple):
    """A schema of any text, or of one of `choices`. `max_length`: in characters."""

    max_length: int | None = None
    choices: tuple[str, ...] | None = None


def property_names(schema: Mapping[str, Any]) -> list[str]:
    """The arguments that a schema names, in its order."""
    properties = schema.get("properties")
    return list(properties) if isinstance(properties, Mapping) else []


def property_schema(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The schema of one argument; an empty one if there is none. `schema`: of all of them."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def json_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """The types that a value may have; None if the schema doesn't tell, or only in many branches.
    `root` has the definitions that it refers to."""
    types: frozenset[str] = frozenset()
    pending, seen = [schema], set[int]()
    while pending:
        found = _resolved(pending.pop(), root)
        if found is None or len(seen) == _MAX_BRANCHES:
            return None
        if id(found) in seen:
            continue
        seen.add(id(found))
        own = _own_types(found)
        if own is not None:
            types |= own
            continue
        branches = found.get("anyOf", found.get("oneOf"))
        if not isinstance(branches, list) or len(branches) > _MAX_BRANCHES:
            return None
        pending += branches
    return types


def _own_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The types that a schema names itself, or whose values it lists."""
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(name for name in given if isinstance(name, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return (
        frozenset(_TYPE_OF[type(value)] for value in values) if isinstance(values, list) else None
    )


def free_text(schema: Any, root: Mapping[str, Any]) -> FreeText | None:
    """What a value is if any text is a valid one, or one of some texts; None if it is more."""
    schema = _resolved(schema, root)
    types = None if schema is None else json_types(schema, root)
    if schema is None or types is None or not {"string"} <= types <= {"string", "null"}:
        return None
    keys = schema.keys() - _ANNOTATIONS
    if keys <= {"enum", "const"}:
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices is None:
            return FreeText()
        is_plain = len(keys) == 1 and all(isinstance(choice, str) for choice in choices)
        return FreeText(choices=tuple(choices)) if is_plain and "null" not in types else None
    if keys == {"maxLength"} and types == {"string"} and schema["maxLength"] in _LENGTHS:
        return FreeText(schema["maxLength"])
    if keys == {"anyOf"} and "type" not in schema:
        branches = [_resolved(branch, root) for branch in schema["anyOf"]]
        is_plain = all(branch is not None and branch.keys() <= _ANNOTATIONS for branch in branches)
        return FreeText() if is_plain else None
    return None


def json_of(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON that a text stands for: a string where the schema wants one, or else the value that
    it reads as, in JSON or Python; a string if it reads as none."""
    types = json_types(schema, root)
    if types != ONLY_TEXT:
        value = _read(text)
        if value is not None and _is_wanted(value.value, types):
            return value.json
    return json.dumps(text, ensure_ascii=False)


class _Value(NamedTuple):
    value: Any
    json: str


def _read(text: str) -> _Value | None:
    stripped = text.strip()
    try:
        return _Value(json.loads(stripped, parse_constant=_no_constant), stripped)
    except (ValueError, RecursionError):
        pass  # maybe Python's
    if not stripped.startswith(("[", "{", "(")) and stripped not in _PYTHON_NAMES:
        return None
    try:
        value = ast.literal_eval(stripped)
        return _Value(value, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} isn't JSON")


def _is_wanted(value: Any, types: frozenset[str] | None) -> bool:
    """Whether a value may stand for a text. Where a string may be, too, only values of the other
    types do."""
    if types is None or "string" not in types:
        return True
    name = _TYPE_OF.get(type(value), "")
    return name != "string" and (name in types or (name == "integer" and "number" in types))


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema behind its references; None if it isn't found."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return None
        reference = schema.get("$ref")
        if reference is None:
            return schema
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        schema = root
        for step in reference[2:].split("/"):
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return None
