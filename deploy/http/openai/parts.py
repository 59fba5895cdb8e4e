"""The parts of an output in the shapes of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.http.body import encode_json
from deploy.http.generation.reading import OutputState
from deploy.http.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text


def finish_reason(state: OutputState, reason: str) -> str:
    """The finish reason of an output whose sequence ended for `reason`. OpenAI's servers say `stop`
    where the request named the function to call. So does an output that a stop string ended within
    a call, which isn't to be run."""
    has_calls = state.num_calls > 0 and not state.is_named and not state.is_cut
    return "tool_calls" if reason == "stop" and has_calls else reason


def message_fields(
    state: OutputState, parts: Sequence[Part], include_reasoning: bool
) -> dict[str, Any]:
    """The fields of a message that hold the whole output, whose parts these are."""
    text, reasoning = [], []
    calls: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case Text():
                text.append(part.text)
            case Reasoning():
                reasoning.append(part.text)
            case CallBegin():
                calls.append(_call(state, part))
            case CallArguments():
                kind, field = _place_of_arguments(state, part)
                calls[part.call][kind][field] += part.text
    thought = "".join(reasoning) if reasoning and include_reasoning else None
    return {
        "content": "".join(text) if text or not (calls or reasoning) else None,
        **({"tool_calls": calls} if calls else {}),
        "reasoning": thought,
        "reasoning_content": thought,
    }


def delta_payloads(
    state: OutputState, parts: Sequence[Part], include_reasoning: bool
) -> list[bytes]:
    """The `delta`s of chunks for parts of the output, which are new."""
    deltas: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case Text():
                deltas.append({"content": part.text})
            case Reasoning():
                if include_reasoning:
                    deltas.append({"reasoning": part.text, "reasoning_content": part.text})
            case CallBegin():
                deltas.append({"tool_calls": [{"index": part.call, **_call(state, part)}]})
            case CallArguments():
                kind, field = _place_of_arguments(state, part)
                deltas.append({"tool_calls": [{"index": part.call, kind: {field: part.text}}]})
    return [encode_json(delta) for delta in deltas]


def _call(state: OutputState, begin: CallBegin) -> dict[str, Any]:
    kind, field = _place_of_arguments(state, begin)
    return {"id": state.call_id(begin), "type": kind, kind: {"name": begin.name, field: ""}}


def _place_of_arguments(state: OutputState, part: CallBegin | CallArguments) -> tuple[str, str]:
    """Where a call has its arguments: a key, and one below it."""
    return ("custom", "input") if state.takes_text(part.call) else ("function", "arguments")
