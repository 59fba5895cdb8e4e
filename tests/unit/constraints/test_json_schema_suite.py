"""The JSON Schema Test Suite: a text is an output of a schema's grammar only if it is valid."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

from engine import structured
from engine.constraints import ConstraintSpec
from engine.errors import RequestError
from tests.support.grammars import EOS, allowed, small_tokenizer, start

ROOT = Path(__file__).resolve().parents[3]
SUITE = ROOT / "tests" / "data" / "json_schema_suite" / "draft2020-12.json"

REFUSED_KEYWORDS = {
    *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$dynamicAnchor"),
}
OTHER_REASONS = (
    "Unknown format: ",
    "retrieving it failed",  # $ref to another document
    "oneOf constraints are not supported",  # branches that may overlap
    "are not disjoint",  # patternProperties
    "Unsatisfiable schema",
    "allows no output",
    "Expected positive integer for",  # 2.0
    "has too many digits",  # multipleOf
    "Pointer '",  # $ref to nothing, or to an $anchor
)


@cache
def suite() -> dict[str, list[dict[str, Any]]]:
    loaded: dict[str, list[dict[str, Any]]] = json.loads(SUITE.read_bytes())
    return loaded


def grammar_of(schema: dict[str, Any]) -> ConstraintSpec:
    return structured.json_schema(schema)


def refusal(schema: dict[str, Any]) -> str | None:
    try:
        start(grammar_of(schema))
    except RequestError as error:
        return error.message
    return None


def groups() -> Iterator[tuple[str, dict[str, Any]]]:
    """Those whose schema is an object; `true` and `false` alone aren't schemas of an output."""
    for name, members in suite().items():
        for group in members:
            if isinstance(group["schema"], dict):
                yield name, group


def is_output(schema: dict[str, Any], text: str) -> bool:
    constraint = start(grammar_of(schema))
    for token in small_tokenizer().encode(text, add_special_tokens=False):
        if not constraint.accept(token):
            return False
    return constraint.is_terminated or EOS[0] in allowed(constraint)


def why_missing(name: str, schema: dict[str, Any], value: Any) -> str | None:
    """Why a valid value isn't among the outputs; None: it should be."""
    if name == "format":
        return "formats are enforced, not only noted"
    if re.search(r"\d\.0\b", json.dumps(value)):
        return "an integer is written without a fraction"
    if isinstance(value, dict):
        for order in permutations(value.items()):
            if is_output(schema, json.dumps(dict(order))):
                return "properties come in the order of the schema"
    return None


def test_an_invalid_value_is_no_output_and_a_valid_one_is() -> None:
    accepted, reasons = Counter[str](), Counter[str]()
    for name, group in groups():
        schema = group["schema"]
        if refusal(schema) is not None:
            continue
        accepted["schemas"] += 1
        for case in group["tests"]:
            accepted["cases"] += 1
            where = f"{name}: {group['description']}: {case['description']}"
            found = is_output(schema, json.dumps(case["data"], ensure_ascii=False))
            assert case["valid"] or not found, where
            if case["valid"] and not found:
                reason = why_missing(name, schema, case["data"])
                assert reason is not None, where
                reasons[reason] += 1
    print(dict(accepted), dict(reasons))
    assert accepted["schemas"] >= 160 and accepted["cases"] >= 570
    assert reasons.total() <= 22


def test_what_is_refused_is_listed() -> None:
    """In words that say which keyword or format, and docs/structured_output.md has all of them."""
    keywords, num_refused = set[str](), 0
    for name, group in groups():
        message = refusal(group["schema"])
        if message is None:
            continue
        num_refused += 1
        named = re.search(r"Unimplemented keys: (\[.*?\])", message)
        if named:
            keywords |= set(json.loads(named[1]))
        else:
            assert any(reason in message for reason in OTHER_REASONS), f"{name}: {message}"
    assert keywords == REFUSED_KEYWORDS
    assert num_refused >= 180
    page = (ROOT / "docs" / "structured_output.md").read_text()
    listed = page[page.index("- Refused:") : page.index("A keyword is never left out")]
    assert {keyword for keyword in keywords if f"`{keyword}`" not in listed} == set()
