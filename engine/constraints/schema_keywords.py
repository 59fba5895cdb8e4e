"""`without_silent`: a JSON schema without the keywords that say nothing.

llguidance refuses keywords that it doesn't know, whatever they say, and sizes such as 1.0. Programs
that make schemas write both.
"""

from __future__ import annotations

from typing import Any

_IN_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with a mapping of names to schemas."""
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = {
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else"),
    *("contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
}
_SIZES = {
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
}
_ANYTHING: tuple[Any, ...] = (True, {})
_SILENT: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": _ANYTHING,
    "unevaluatedItems": _ANYTHING,
    "propertyNames": (*_ANYTHING, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
    "then": _ANYTHING,
    "else": _ANYTHING,
}
"""The values with which a keyword allows all that is allowed without it."""


def without_silent(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, new. Values of `enum`, `const` and the like stay as they are."""
    given = {key: _plain(key, value) for key, value in schema.items()}
    kept = {key: value for key, value in given.items() if not _says_nothing(key, value)}
    if kept.get("minContains") == 0 and "maxContains" not in kept:
        del kept["minContains"]
        kept.pop("contains", None)
    if "contains" not in kept:
        kept = {key: value for key, value in kept.items() if not key.endswith("Contains")}
    if "if" not in kept:
        kept = {key: value for key, value in kept.items() if key not in ("then", "else")}
    elif "then" not in kept and "else" not in kept:
        del kept["if"]
    return kept


def _plain(key: str, value: Any) -> Any:
    if key in _SIZES:
        return int(value) if isinstance(value, float) and value.is_integer() else value
    if key in _IN_MAPS and isinstance(value, dict):
        return {name: _schema(inner) for name, inner in value.items()}
    if isinstance(value, list) and (key in _IN_LISTS or key == "items"):
        return [_schema(inner) for inner in value]
    return _schema(value) if key in _ALONE else value


def _schema(value: Any) -> Any:
    return without_silent(value) if isinstance(value, dict) else value


def _says_nothing(key: str, value: Any) -> bool:
    # Types too: 0 is no `false`.
    return any(type(value) is type(one) and value == one for one in _SILENT.get(key, ()))
