"""The parts of a model's output, in the order in which they come."""

from __future__ import annotations

from typing import NamedTuple


class Text(NamedTuple):
    """More of the answer."""

    text: str


class Reasoning(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins. `call` counts the calls of an output from 0."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments. All pieces together are JSON, if the model wrote JSON."""

    call: int
    text: str


Part = Text | Reasoning | CallBegin | CallArguments


def joined(parts: list[Part]) -> list[Part]:
    """The same with neighbours of one kind made one, and without empty ones."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        match part, last:
            case Text("") | Reasoning(""), _:
                continue
            case Text(text), Text(before):
                result[-1] = Text(before + text)
            case Reasoning(text), Reasoning(before):
                result[-1] = Reasoning(before + text)
            case CallArguments(call, text), CallArguments(same, before) if call == same:
                result[-1] = CallArguments(call, before + text)
            case _:
                result.append(part)
    return result
