"""What client libraries and agents send (`tests/recorded`) is answered, in shapes they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from pydantic import TypeAdapter

from deploy.http.anthropic.replies import MessageEvent, MessageReply, TokenCount
from deploy.http.openai.replies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Embeddings,
)
from deploy.http.openai.responses.replies import Response, ResponseEvent
from tests.recorded.answering_client import AnsweringClient
from tests.support.api_calls import call, named_events

BODIES = Path(__file__).resolve().parents[3] / "recorded" / "bodies"
SHAPES: dict[str, tuple[Any, Any]] = {
    "/v1/completions": (Completion, CompletionChunk),
    "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "/v1/responses": (Response, ResponseEvent),
    "/v1/messages": (MessageReply, MessageEvent),
    "/v1/messages/count_tokens": (TokenCount, None),
    "/v1/embeddings": (Embeddings, None),
}
"""By path: a reply in one piece, and an event of a stream."""


class Recorded(NamedTuple):
    """One request of a client."""

    client: str
    number: int
    request: dict[str, Any]

    @property
    def path(self) -> str:
        return str(self.request["path"]).partition("?")[0]

    def __str__(self) -> str:
        return f"{self.client}-{self.number}"


def recordings() -> list[Recorded]:
    return [
        Recorded(found["client"], number, request)
        for file in sorted(BODIES.glob("*.json"))
        for found in [json.loads(file.read_text())]
        for number, request in enumerate(found["requests"])
    ]


RECORDED = recordings()


def send(recorded: Recorded, body: dict[str, Any] | None) -> httpx.Response:
    given = recorded.request
    options = {} if body is None else {"json": body}
    return call(
        AnsweringClient(), given["method"], given["path"], headers=given["headers"], **options
    )


def check(recorded: Recorded, body: dict[str, Any] | None) -> None:
    reply = send(recorded, body)
    if body is not None and "thread" in body:  # Anthropic's client then sends it without
        details = reply.json()["error"]["details"]
        assert (reply.status_code, details["error_code"]) == (400, "thread_unsupported_request")
        return
    assert reply.status_code == 200, (str(recorded), reply.text[:500])
    if recorded.path not in SHAPES:
        assert reply.json()
        return
    whole, event = SHAPES[recorded.path]
    if body is None or not body.get("stream"):
        TypeAdapter(whole).validate_python(reply.json())
        return
    events = named_events(reply)
    assert events
    for each in events:
        TypeAdapter(event).validate_python(each)


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_a_recorded_request_is_answered(recorded: Recorded) -> None:
    check(recorded, recorded.request.get("body"))


def decorated(value: Any) -> Any:
    """The body with a key of next week in each message, block, item and tool."""
    if isinstance(value, list):
        return [decorated(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: decorated(item) for key, item in value.items() if key in PARTS}
    return {**value, **made, "x_of_next_week": {"a": [1]}}


PARTS = ("messages", "input", "content", "tool_calls", "tools")
"""Where unknown keys are ignored (docs/api.md)."""


@pytest.mark.parametrize(
    "recorded", [each for each in RECORDED if each.request.get("body")], ids=str
)
def test_unknown_keys_of_parts_change_nothing(recorded: Recorded) -> None:
    body = recorded.request["body"]
    parts = {
        key: decorated(item)
        for key, item in body.items()
        if key in PARTS and not isinstance(item, str)
    }
    if all(isinstance(item, dict) for part in parts.values() for item in part):
        check(recorded, {**body, **parts})


def test_the_clients_that_matter_are_recorded() -> None:
    names = {each.client for each in RECORDED}
    assert {"claude-code", "codex", "openai-python", "anthropic-python", "openai-js"} <= names
