"""Arguments that are written without JSON's quotes: the tool's schema says what a text means."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_MAX_DEPTH = 8
"""References that are followed one behind the other, and `anyOf` within `anyOf`."""
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


def property_schema(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The schema of one argument; an empty one if there is none. `schema`: of all of them."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def json_types(
    schema: Any, root: Mapping[str, Any], depth: int = _MAX_DEPTH
) -> frozenset[str] | None:
    """The types that a value may have; None if the schema doesn't tell, or not within `depth`
    levels. `root` has the definitions that it refers to."""
    schema = _resolved(schema, root)
    if schema is None or depth == 0:
        return None
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(name for name in given if isinstance(name, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_TYPE_OF[type(value)] for value in values)
    branches = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(branches, list):
        return None
    types: frozenset[str] = frozenset()
    for branch in branches:
        of_branch = json_types(branch, root, depth - 1)
        if of_branch is None:
            return None
        types |= of_branch
    return types


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
    if types != {"string"}:
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
    for _ in range(_MAX_DEPTH):
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
