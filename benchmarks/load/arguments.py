"""Types of command-line arguments that the serving benchmarks share."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """A whole number from 0 on."""
    return _at_least(0, text)


def positives(text: str) -> list[int]:
    """A list such as `1,32`."""
    return [positive(part) for part in text.split(",")]


def naturals(text: str) -> list[int]:
    """A list such as `0,1`."""
    return [natural(part) for part in text.split(",")]


def words(text: str) -> list[str]:
    """A list such as `vllm,manta`."""
    return text.split(",")


def key_value(text: str) -> tuple[str, str]:
    """`key=value`; the value may be empty or hold further `=`."""
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise ArgumentTypeError(f"{text!r} is not key=value")
    return key, value


def json_object(text: str) -> dict[str, object]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArgumentTypeError("must be a JSON object")
    return value


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"must be a whole number from {least} on, not {text!r}")
    return int(text)
