"""Grammars that clients may send to do harm: they are deep, large, ambiguous or wrong."""

from __future__ import annotations

import json
import random
from string import ascii_lowercase
from typing import Any

from engine.constraints import ConstraintSpec


def chain(count: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "null"}}}


def rules(count: int) -> str:
    links = (f'r{i}: "a" r{i + 1}' for i in range(count))
    return "\n".join(["start: r0", *links, f'r{count}: "b"'])


def random_words(count: int) -> str:
    rng = random.Random(0)
    return "|".join("".join(rng.choices(ascii_lowercase, k=12)) for _ in range(count))


def spec(kind: str, value: Any) -> ConstraintSpec:
    value = value if isinstance(value, str | list) else json.dumps(value)
    return ConstraintSpec("grammar", {"type": kind, "value": value})


MAY_PASS = {
    "nested repeats": spec("regex", "(a+)+b"),
    "a million repeats": spec("regex", "a{0,1000000}"),
    "maxLength of a million": spec("json_schema", {"type": "string", "maxLength": 10**6}),
    "minItems of a million": spec("json_schema", {"type": "array", "minItems": 10**6}),
    "a recursive schema": spec(
        "json_schema",
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        },
    ),
    "10,000 choices": spec("choice", [f"c{i}" for i in range(10_000)]),
    "490 chained $refs": spec("json_schema", chain(490)),
    "490 chained rules": spec("lark", rules(490)),
    "2,000 properties": spec(
        "json_schema",
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}},
    ),
    "an ambiguous grammar": spec("lark", 'start: s\ns: s s s | s s | "a"'),
}
NEVER_PASS = {
    "30,000 parentheses": spec("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "30,000 parentheses in Lark": spec("lark", f'start: {"(" * 30_000}"a"{")" * 30_000}'),
    "nested thousandfold repeats": spec("regex", "((a{0,1000}){0,1000}){0,1000}"),
    "nesting of 1000": spec("json_schema", '{"items":' * 1000 + "{}" + "}" * 1000),
    "nesting of 30,000": spec("json_schema", '{"items":' * 30_000 + "{}" + "}" * 30_000),
    "100,000 choices": spec("choice", [f"c{i}" for i in range(100_000)]),
    "100,000 alternatives": spec("regex", "|".join(f"c{i}" for i in range(100_000))),
    "100,000 random alternatives": spec("regex", random_words(100_000)),
    "100,000 enum values": spec("json_schema", {"enum": list(range(100_000))}),
    "20,000 chained rules": spec("lark", rules(20_000)),
    "20,000 chained $refs": spec("json_schema", chain(20_000)),
    "a $ref to itself": spec("json_schema", {"$ref": "#"}),
    "a large automaton": spec(
        "lark", "start: A\nA: " + " & ".join(f"/(.{{{n}}})*/" for n in (7, 11, 13, 17, 19, 23, 29))
    ),
    "a broken regular expression": spec("regex", "(a"),
    "a broken schema": spec("json_schema", {"type": 5}),
}
