"""JSON schemas over the keywords that docs/structured_output.md promises, at random."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

CHECK_FORMATS = jsonschema.FormatChecker(["uuid", "email", "ipv4"])  # Python has no year 0
FORMATS = ["date", "time", "date-time", "uuid", "email", "ipv4"]
PATTERNS = ["^[a-z]{2,5}$", "^[A-Z][0-9]+$", "[0-9]", "^(yes|no)$"]
NAMES = ["name", "age", "x", "list of things", "naïve", 'quo"te', "a.b"]


def check_json(text: str, schema: dict[str, Any]) -> None:
    """The text is JSON of whole characters that `schema` accepts."""
    text.encode()
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECK_FORMATS)
    validator.validate(json.loads(text))


def random_schema(rng: random.Random) -> dict[str, Any]:
    """Keywords: type (one or several), enum, const, properties, required, additionalProperties,
    patternProperties, maxProperties, items, prefixItems, minItems, maxItems, minimum, maximum,
    exclusiveMinimum, exclusiveMaximum, multipleOf, minLength, maxLength, pattern, format, anyOf,
    allOf, oneOf with different types, $ref and $defs (also recursive)."""
    defs: dict[str, Any] = {}
    if rng.random() < 0.4:
        defs["leaf"] = _scalar(rng)
    if rng.random() < 0.3:
        defs["tree"] = {
            "type": "object",
            "properties": {
                "value": _scalar(rng),
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    schema = _schema(rng, 3, list(defs))
    return {**schema, "$defs": defs} if defs else schema


def random_object(rng: random.Random) -> dict[str, Any]:
    """The schema of an object, with the same keywords."""
    return _object(rng, 2, [])


def _schema(rng: random.Random, depth: int, defs: list[str]) -> dict[str, Any]:
    if defs and rng.random() < 0.15:
        return {"$ref": f"#/$defs/{rng.choice(defs)}"}
    makers = [_scalar, _scalar] if depth == 0 else [_scalar, _object, _object, _array, _any_of]
    maker = rng.choice(makers)
    return maker(rng) if maker is _scalar else maker(rng, depth - 1, defs)


def _object(rng: random.Random, depth: int, defs: list[str]) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(rng, depth, defs) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    match rng.randrange(4):
        case 0 | 1:
            schema["additionalProperties"] = False
        case 2:
            schema["additionalProperties"] = _scalar(rng)
    if rng.random() < 0.1:
        return {"type": "object", "maxProperties": 2, "additionalProperties": _scalar(rng)}
    if rng.random() < 0.1:
        schema["patternProperties"] = {"^x-": _scalar(rng)}
    return schema


def _array(rng: random.Random, depth: int, defs: list[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _schema(rng, depth, defs)}
    low = rng.randrange(3)
    if rng.random() < 0.5:
        schema["minItems"] = low
    if rng.random() < 0.7:
        schema["maxItems"] = low + rng.randrange(3)
    if rng.random() < 0.2:
        schema["prefixItems"] = [_scalar(rng), _scalar(rng)]
    return schema


def _any_of(rng: random.Random, depth: int, defs: list[str]) -> dict[str, Any]:
    match rng.randrange(3):
        case 0:
            return {"anyOf": [_schema(rng, depth, defs) for _ in range(rng.randrange(1, 4))]}
        case 1:
            return {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 5}]}
        case _:
            return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 10**6}]}


def _scalar(rng: random.Random) -> dict[str, Any]:
    match rng.randrange(9):
        case 0:
            return _integer(rng)
        case 1:
            low = rng.randrange(-50, 50) / 4
            return {"type": "number", "minimum": low, "exclusiveMaximum": low + 10}
        case 2:
            low = rng.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 9)}
        case 3:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case 4:
            return {"type": "string", "format": rng.choice(FORMATS)}
        case 5:
            return {"enum": rng.sample(["a", "ab", 1, 2.5, True, None, [1], {"k": "v"}, "é\n"], 3)}
        case 6:
            return {"const": rng.choice(["fixed", 7, None, {"a": [1, "x"]}])}
        case 7:
            return {"type": rng.sample(["integer", "boolean", "null", "string"], 2)}
        case _:
            return {"type": "boolean"}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(-1000, 1000)
    schema: dict[str, Any] = {"type": "integer"}
    match rng.randrange(4):
        case 0:
            schema |= {"minimum": low, "maximum": low + rng.randrange(1, 500)}
        case 1:
            schema |= {"exclusiveMinimum": low}
        case 2:
            schema |= {"multipleOf": rng.choice([2, 5, 10])}
    return schema
