"""Replies and streams of `POST /v1/responses`."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

from deploy.http.body import encode_json
from deploy.http.errors import ErrorReply
from deploy.http.generation.generation import Generation
from deploy.http.openai.logprobs import LogprobStyle, chat_logprobs
from deploy.http.openai.responses.output import Event, OutputItems, Status
from deploy.http.openai.responses.request import ResponsesRequest
from deploy.http.parsers.parts import Part, Text, joined
from engine.errors import RequestError
from engine.protocol.tokenizer_messages import LogprobEntry, TextDelta

_ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls",
    "prompt_cache_key", "safety_identifier", "service_tier", "top_logprobs", "truncation", "user",
)  # fmt: skip
"""Fields of the request that its response repeats."""


class ResponseGeneration(Generation[ResponsesRequest]):
    """One response, whose output is items. Where there is a store, it is kept."""

    _sequence_number = 2
    """Of the next event; the opening has 0 and 1, though it is made after the first delta's."""
    _final: dict[str, Any] | None = None
    """The response, once it has ended."""

    @property
    def is_queued(self) -> bool:
        is_new = self.keeper is not None and self.keeper.is_new
        return is_new and self._request.background and not self.stream

    @property
    def keeps_reply(self) -> bool:
        return True

    async def result(self) -> bytes:
        if self.is_queued:
            await self._keep()
            return encode_json(self._response("queued"))
        return await super().result()

    def _first_response(self) -> dict[str, Any]:
        return self._response("in_progress")

    def response_to_keep(self) -> dict[str, Any]:
        if self._final is not None:
            return self._final
        return self._response("in_progress" if self._request.background else "cancelled")

    @cached_property
    def _items(self) -> OutputItems:
        state = self._outputs[0].state
        return OutputItems(state, self._request.wants_logprobs, self._plan.new_id)

    @cached_property
    def _waiting_logprobs(self) -> list[LogprobEntry]:
        """Of tokens whose text isn't there yet."""
        return []

    def _reply(self) -> bytes:
        output = self._outputs[0]
        self._add("".join(output.texts), output.logprobs)
        self._items.close(self._item_status)
        self._final = self._response(self._status)
        return encode_json(self._final)

    def _opening(self) -> bytes:
        response = self._response("in_progress")
        kinds = enumerate(("response.created", "response.in_progress"))
        return b"".join(_encode({"type": kind, "response": response}, n) for n, kind in kinds)

    def _events(self, index: int, delta: TextDelta) -> bytes:
        return self._encode(self._add(delta.text, delta.logprobs or []))

    def _ending(self) -> bytes:
        events = self._items.close(self._item_status)
        self._final = self._response(self._status)
        end = {"type": f"response.{self._status}", "response": self._final}
        return self._encode([*events, end])

    def error_event(self, failure: RequestError, error: ErrorReply) -> bytes:
        code = failure.code or "server_error"
        described = {"code": code, "message": failure.message, "param": failure.param}
        events = self._items.close("incomplete")
        failed = self._response("failed")
        failed["error"] = {"code": "server_error", "message": failure.message}
        return self._encode(
            [
                *events,
                {"type": "error", **described},
                {"type": "response.failed", "response": failed},
            ]
        )

    def _add(self, text: str, logprobs: list[LogprobEntry]) -> list[Event]:
        """Put more of the output into items."""
        state = self._outputs[0].state
        parts: list[Part] = [Text(text)] if text else []
        if state is not None:
            parts = joined(state.take())
        if self._request.wants_logprobs:
            self._waiting_logprobs.extend(logprobs)
        events = []
        for part in parts:
            shown: list[dict[str, Any]] = []
            if isinstance(part, Text) and self._waiting_logprobs:
                style = LogprobStyle(self._request.top_logprobs)
                shown = chat_logprobs(self._waiting_logprobs, style)["content"]
                self._waiting_logprobs.clear()
            events += self._items.add(part, shown)
        return events

    def _encode(self, events: list[Event]) -> bytes:
        first = self._sequence_number
        self._sequence_number += len(events)
        return b"".join(_encode(event, first + n) for n, event in enumerate(events))

    @property
    def _item_status(self) -> Status:
        """That of the last item."""
        state = self._outputs[0].state
        return "incomplete" if state is not None and state.is_cut else self._status

    @property
    def _status(self) -> Status:
        return "completed" if self._outputs[0].finish_reason == "stop" else "incomplete"

    def _response(self, status: str) -> dict[str, Any]:
        given, plan = self._request, self._plan
        params = plan.sequences[0].params
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        has_ended = status in ("completed", "incomplete", "failed")
        return {
            "id": plan.request.id,
            "object": "response",
            "created_at": plan.created,
            "completed_at": self._completed_at if status == "completed" else None,
            "status": status,
            "background": given.background,
            "error": None,
            "incomplete_details": incomplete,
            "model": plan.model,
            **{name: getattr(given, name) for name in _ECHOED},
            "output": self._items.items if has_ended else [],
            "previous_response_id": given.previous_response_id,
            "reasoning": {"effort": given.reasoning.effort, "summary": None},
            "store": self.keeper is not None,
            "temperature": params.temperature,
            "text": given.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": _dumped(given.tool_choice),
            "tools": [tool.model_dump() for tool in given.tools],
            "top_p": params.top_p,
            "usage": self._usage() if has_ended else None,
            **({"ignored_tools": plan.ignored_tools} if plan.ignored_tools else {}),
        }

    @property
    def _completed_at(self) -> int:
        """Unix time: now, unless this was said before."""
        kept = None if self.keeper is None else self.keeper.record.response
        said = None if kept is None else kept.get("completed_at")
        return int(time.time()) if said is None else int(said)

    def _usage(self) -> dict[str, Any]:
        state = self._outputs[0].state
        return {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {
                "cached_tokens": self._num_cached,
                "cache_write_tokens": 0,
            },
            "output_tokens": self._num_output,
            "output_tokens_details": {
                "reasoning_tokens": 0 if state is None else state.num_reasoning
            },
            "total_tokens": self._num_prompt + self._num_output,
        }


def _encode(event: Event, number: int) -> bytes:
    data = encode_json({**event, "sequence_number": number})
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), data)


def _dumped(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True)
