"""What client libraries and agents were recorded to send (`make record-clients`) is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from deploy.http.openai.responses.replies import InputTokens, Response, ResponseEvent
from tests.support.answering_client import CONTEXT, TEXT, VOCABULARY, AnsweringClient
from tests.support.api_calls import call, events, named_events
from tests.support.fake_client import FakeEngineClient

BODIES = Path(__file__).parents[3] / "recorded" / "bodies"
REPLIES: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "/v1/completions": (Completion, CompletionChunk),
    "/v1/embeddings": (Embeddings, None),
    "/v1/messages": (MessageReply, MessageEvent),
    "/v1/messages/count_tokens": (TokenCount, None),
    "/v1/responses": (Response, ResponseEvent),
    "/v1/responses/input_tokens": (InputTokens, None),
}
"""What a path answers: whole, and in each event of a stream."""
ENDS = {
    "/v1/messages": ("message_stop",),
    "/v1/responses": ("response.completed", "response.incomplete"),
}
"""The last event of a stream, where there is no [DONE]."""
PROBES = ("/tokenizer_info",)
"""Routes that a client tries and can do without."""
WANTED = {
    *("ai-sdk", "aider", "anthropic-js", "anthropic-python", "claude-code", "codex"),
    *("instructor", "langchain", "litellm", "llama-index", "llm", "lm-eval", "open-webui"),
    *("openai-agents", "openai-js", "openai-python", "promptfoo", "pydantic-ai"),
}
DECORATION = {"x_decoration": {"of": ["a", 1, None]}}


class Recorded(NamedTuple):
    """One request of a client."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def route(self) -> str:
        return self.path.split("?")[0]


def recordings() -> list[Any]:
    """Parameters of tests."""
    found = []
    for file in sorted(BODIES.glob("*.json")):
        recording = json.loads(file.read_text())
        for number, each in enumerate(recording["requests"]):
            request = Recorded(each["method"], each["path"], each["headers"], each.get("body", {}))
            found.append(pytest.param(request, id=f"{recording['client']}-{number}"))
    return found


def send(
    request: Recorded, body: dict[str, Any], client: FakeEngineClient | None = None
) -> httpx.Response:
    client = client or AnsweringClient()
    options = {"json": body} if body else {}
    headers = {name: value for name, value in request.headers.items() if name != "content-type"}
    return call(client, request.method, request.path, headers=headers, **options)


def check(request: Recorded, body: dict[str, Any]) -> None:
    """The request succeeds, and its reply or stream has the shape that the API promises."""
    reply = send(request, body)
    if "thread" in body:
        # The client goes on without it.
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["details"]["error_code"] == "thread_unsupported_request"
        body = {name: value for name, value in body.items() if name != "thread"}
        reply = send(request, body)
    if request.route in PROBES:
        assert reply.status_code == 404
        return
    assert reply.status_code == 200, reply.text
    if request.method == "GET":
        assert reply.json()
        return
    whole, event = REPLIES[request.route]
    if not body.get("stream"):
        TypeAdapter(whole).validate_python(reply.json())
        return
    assert reply.headers["content-type"].startswith("text/event-stream")
    ends = ENDS.get(request.route)
    found = named_events(reply) if ends else events(reply)
    assert found
    for each in found:
        TypeAdapter(event).validate_python(each)
    if ends:
        assert found[-1]["type"] in ends


def decorated(body: dict[str, Any]) -> dict[str, Any]:
    """The body with an unknown key in each message, item, part, block, call and tool."""
    body = json.loads(json.dumps(body))
    for field in ("messages", "input", "system"):
        if isinstance(body.get(field), list):
            for message in body[field]:
                decorate_message(message)
    for tool in body.get("tools", ()):
        decorate_tool(tool)
    return body


def decorate_message(message: Any) -> None:
    if not isinstance(message, dict):
        return
    for field in ("content", "output", "tool_calls"):
        parts = message.get(field)
        for part in parts if isinstance(parts, list) else ():
            decorate_message(part)
    message.update(DECORATION)


def decorate_tool(tool: dict[str, Any]) -> None:
    for inner in tool.get("tools", ()):
        decorate_tool(inner)
    if isinstance(tool.get("function"), dict):
        tool["function"].update(DECORATION)
    tool.update(DECORATION)


def decorable() -> list[Any]:
    """The recordings with something to decorate."""
    return [each for each in recordings() if decorated(each.values[0].body) != each.values[0].body]


Place = tuple[str | int, ...]


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """The way to each value of a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


def with_odd(body: dict[str, Any], path: Place, odd: Any) -> dict[str, Any]:
    """The body with `odd` in one place."""
    body = json.loads(json.dumps(body))
    inner: Any = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return body


def places_of_all() -> dict[tuple[str, Place], tuple[Recorded, Place]]:
    """One of each kind of place, by its route and the names on the way."""
    found = {}
    for recording in recordings():
        request = recording.values[0]
        for path in places(request.body):
            names = tuple("*" if isinstance(key, int) else key for key in path)
            found[request.route, names] = request, path
    return found


def test_there_are_recordings_of_every_client() -> None:
    assert {file.stem for file in BODIES.glob("*.json")} >= WANTED
    # Somebody's prompts and whole histories are not for this repository.
    assert sum(file.stat().st_size for file in BODIES.glob("*.json")) < 10**6


@pytest.mark.parametrize("request_", recordings())
def test_a_recorded_request_is_answered(request_: Recorded) -> None:
    check(request_, request_.body)


@pytest.mark.parametrize("request_", decorable())
def test_unknown_keys_inside_messages_and_tools_are_ignored(request_: Recorded) -> None:
    check(request_, decorated(request_.body))


@pytest.mark.parametrize("odd", [[], "zz", None])
def test_an_odd_value_in_any_place_is_answered_or_refused(odd: Any) -> None:
    for request, path in places_of_all().values():
        client = FakeEngineClient(CONTEXT, VOCABULARY, tool_format="hermes")
        client.script = TEXT
        reply = send(request, with_odd(request.body, path, odd), client)
        assert reply.status_code in (200, 400, 404), (request.route, path, odd, reply.text)
