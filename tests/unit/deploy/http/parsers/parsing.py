"""Outputs that come in pieces, and the parts that parsers make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deploy.http.parsers.output_parser import OutputParser
from deploy.http.parsers.parts import CallArguments, CallBegin, Part, joined
from deploy.http.parsers.tool_parser import ToolParser


def parsed(
    kind: type[ToolParser],
    tools: dict[str, dict[str, Any]],
    text: str,
    cuts: list[int] | None = None,
) -> list[Part]:
    return read(lambda: OutputParser(None, kind(tools), None), text, cuts)


def read(make: Callable[[], OutputParser], text: str, cuts: list[int] | None = None) -> list[Part]:
    """The parts of `text`, which comes in pieces that end at `cuts`."""
    parser, parts, begin = make(), [], 0
    for end in [*sorted(cuts or []), len(text)]:
        parts += parser.feed(text[begin:end])
        begin = end
    return joined(parts + parser.finish())


def check_cuts(make: Callable[[], OutputParser], text: str, expected: list[Part]) -> None:
    """The parts are the expected ones, wherever the text is cut."""
    assert read(make, text) == expected
    for cut in range(len(text) + 1):
        assert read(make, text, [cut]) == expected, cut
    assert read(make, text, list(range(len(text)))) == expected


def call(name: str, arguments: str, number: int = 0) -> list[Part]:
    return [CallBegin(number, name), CallArguments(number, arguments)]
