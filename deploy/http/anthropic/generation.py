"""Replies and streams of `POST /v1/messages`."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from deploy.http.anthropic.blocks import INVALID_JSON
from deploy.http.anthropic.request import MessagesRequest
from deploy.http.body import encode_json
from deploy.http.engine_client import EngineClient
from deploy.http.generation.generation import Generation
from deploy.http.generation.plan import Plan
from deploy.http.metrics import RequestTracker
from deploy.http.parsers.json_reader import ValueReader
from deploy.http.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text, joined
from engine.protocol.tokenizer_messages import TextDelta


class MessageGeneration(Generation[MessagesRequest]):
    """One message, whose content is blocks."""

    _num_blocks = 0
    """Blocks of the stream that have begun."""
    _open = ""
    """The type of the block that is being sent; "" between blocks."""

    def __init__(
        self,
        client: EngineClient,
        fields: MessagesRequest,
        plan: Plan,
        tracker: RequestTracker,
        applied_edits: list[dict[str, Any]] | None,
    ) -> None:
        """`applied_edits`: those of `context_management`; None if none were asked for."""
        super().__init__(client, fields, plan, tracker)
        self._context = {}
        if applied_edits is not None:
            self._context = {"context_management": {"applied_edits": applied_edits}}

    def _reply(self) -> bytes:
        output = self._outputs[0]
        content: list[dict[str, Any]] = []
        arguments: dict[int, str] = {}
        for part in joined(self._take("".join(output.texts))):
            match part:
                case CallArguments():
                    arguments[part.call] = arguments.get(part.call, "") + part.text
                case CallBegin():
                    content.append({**self._empty_block(part), "input": part.call})
                case Text():
                    content.append({"type": "text", "text": part.text})
                case Reasoning():
                    shown = "" if self._request.omits_thinking else part.text
                    content.append({**self._empty_block(part), "thinking": shown})
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = _parse(arguments.get(block["input"], ""))
        end = self._end() | {"usage": self._usage()} | self._context
        return encode_json(self._message(content) | end)

    def _opening(self) -> bytes:
        nothing = {"stop_reason": None, "stop_sequence": None}
        message = self._message([]) | nothing | {"usage": self._usage() | {"output_tokens": 0}}
        return _event("message_start", message=message)

    def _events(self, index: int, delta: TextDelta) -> bytes:
        return b"".join(map(self._part_events, self._take(delta.text)))

    def _ending(self) -> bytes:
        return (
            self._close()
            + _event("message_delta", delta=self._end(), usage=self._usage(), **self._context)
            + _event("message_stop")
        )

    def _take(self, text: str) -> list[Part]:
        """The parts of an output: what is new of its state, or `text`."""
        state = self._outputs[0].state
        parts: list[Part] = [Text(text)] if text else []
        if state is not None:
            parts = state.take()
        if not self._request.shows_thinking:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        return parts

    def _part_events(self, part: Part) -> bytes:
        match part:
            case CallBegin():
                return self._close() + self._begin("tool_use", part)
            case CallArguments():
                return self._delta({"type": "input_json_delta", "partial_json": part.text})
            case Text():
                begin = b"" if self._open == "text" else self._close() + self._begin("text", part)
                return begin + self._delta({"type": "text_delta", "text": part.text})
            case Reasoning():
                is_open = self._open == "thinking"
                begin = b"" if is_open else self._close() + self._begin("thinking", part)
                if self._request.omits_thinking:
                    return begin
                return begin + self._delta({"type": "thinking_delta", "thinking": part.text})

    def _begin(self, kind: str, part: Part) -> bytes:
        self._open = kind
        self._num_blocks += 1
        block = self._empty_block(part)
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> bytes:
        """End the block that is being sent."""
        if not self._open:
            return b""
        end = b""
        if self._open == "thinking":  # clients that send it back expect a signature
            end = self._delta({"type": "signature_delta", "signature": ""})
        self._open = ""
        return end + _event("content_block_stop", index=self._num_blocks - 1)

    def _empty_block(self, part: Part) -> dict[str, Any]:
        match part:
            case CallBegin():
                state = self._outputs[0].state
                assert state is not None
                name = state.call_id(part).replace("call_", "toolu_")
                return {"type": "tool_use", "id": name, "name": part.name, "input": {}}
            case Reasoning():
                return {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                return {"type": "text", "text": ""}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._plan.request.id,
            "type": "message",
            "role": "assistant",
            "model": self._plan.model,
            "content": content,
            **({"ignored_tools": ignored} if (ignored := self._plan.ignored_tools) else {}),
        }

    def _end(self) -> dict[str, Any]:
        """Why the message ended."""
        output = self._outputs[0]
        stop = output.stop_reason if isinstance(output.stop_reason, str) else None
        reason = "end_turn" if output.finish_reason == "stop" else "max_tokens"
        state = output.state
        has_calls = state is not None and state.num_calls > 0 and not state.is_cut
        if has_calls and reason == "end_turn":
            reason = "tool_use"
        elif stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        """Tokens that the cache had aren't among `input_tokens`."""
        return {
            "input_tokens": self._num_prompt - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": self._num_output,
        }


def _parse(arguments: str) -> dict[str, Any]:
    """The input of a call: what is complete of it, if the model was cut off (as clients do). What
    isn't an object, or of which nothing is complete, is told as it is, under the name that
    Anthropic's documentation has for it."""
    text = arguments.strip()
    if not text:
        return {}
    try:
        value = _read(text)
        json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}


def _read(text: str) -> Any:
    """The value of JSON that may be cut off; None if nothing of it is complete. Raises
    `ValueError` if it is broken."""
    reader = ValueReader()
    reader.feed(text, 0)
    if reader.is_done:
        return from_json(text, allow_inf_nan=False)
    return from_json(text, allow_inf_nan=False, allow_partial="trailing-strings") or None


def _event(kind: str, **fields: Any) -> bytes:
    data = encode_json({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
