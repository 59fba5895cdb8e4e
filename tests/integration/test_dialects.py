"""All APIs say the same of the same greedy prompt: streamed and whole, with a resume in the
middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import aiohttp
import httpx
import pytest

from benchmarks.servers import ManagedServer
from deploy.http.sse_decoder import SSEDecoder
from tests.support.http_server import manta
from tests.support.processes import actor_pids, launch_mark

MESSAGES = [{"role": "user", "content": "Write a class with ten methods."}]
MAX_TOKENS = 400
GREEDY = {"temperature": 0}
KILL_AFTER = 20
"""Events of each stream."""


class Answer(NamedTuple):
    """What an API said. `usage`: tokens of the prompt, of the output, and those that were cached;
    None in events that don't have it."""

    text: str
    usage: tuple[int, int, int] | None


class Dialect(NamedTuple):
    """How to ask, and how to read the answer. `gather` puts the events of a stream together."""

    path: str
    body: Callable[[list[int]], dict[str, Any]]
    read: Callable[[dict[str, Any]], Answer]
    gather: Callable[[list[dict[str, Any]]], Answer]


def _openai_usage(usage: dict[str, Any]) -> tuple[int, int, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"], cached


def _choices(text_of: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    """For replies with `choices`."""

    def gather(events: list[dict[str, Any]]) -> Answer:
        *chunks, last = events
        text = "".join(text_of(chunk["choices"][0]) for chunk in chunks)
        return Answer(text, _openai_usage(last["usage"]))

    return {
        "read": lambda r: Answer(text_of(r["choices"][0]), _openai_usage(r["usage"])),
        "gather": gather,
    }


def _chat_text(choice: dict[str, Any]) -> str:
    message = choice["message"] if "message" in choice else choice["delta"]
    return str(message.get("content", ""))


def _response(reply: dict[str, Any]) -> Answer:
    (item,) = reply["output"]
    usage = reply["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Answer(
        item["content"][0]["text"], (usage["input_tokens"], usage["output_tokens"], cached)
    )


def _response_events(events: list[dict[str, Any]]) -> Answer:
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    answer = _response(events[-1]["response"])
    assert "".join(deltas) == answer.text
    return answer


def _messages_usage(usage: dict[str, Any]) -> tuple[int, int, int]:
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, usage["output_tokens"], cached


def _message_events(events: list[dict[str, Any]]) -> Answer:
    deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    (usage,) = [e["usage"] for e in events if e["type"] == "message_delta"]
    return Answer("".join(deltas), _messages_usage(usage))


def _sglang(reply: dict[str, Any]) -> Answer:
    meta = reply["meta_info"]
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    prompt, output, cached = (meta[name] for name in names)
    return Answer(reply["text"], (prompt, output, cached))


DIALECTS = {
    "completions": Dialect(
        "/v1/completions",
        lambda ids: {"prompt": ids, "max_tokens": MAX_TOKENS, **GREEDY},
        **_choices(lambda choice: str(choice["text"])),
    ),
    "chat": Dialect(
        "/v1/chat/completions",
        lambda _: {"messages": MESSAGES, "max_tokens": MAX_TOKENS, **GREEDY},
        **_choices(_chat_text),
    ),
    "responses": Dialect(
        "/v1/responses",
        lambda _: {"input": MESSAGES, "max_output_tokens": MAX_TOKENS, **GREEDY},
        _response,
        _response_events,
    ),
    "messages": Dialect(
        "/v1/messages",
        lambda _: {"messages": MESSAGES, "max_tokens": MAX_TOKENS, **GREEDY},
        lambda r: Answer(r["content"][0]["text"], _messages_usage(r["usage"])),
        _message_events,
    ),
    "sglang": Dialect(
        "/generate",
        lambda ids: {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": MAX_TOKENS, **GREEDY},
        },
        _sglang,
        lambda events: _sglang(events[-1]),
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ManagedServer]:
    with manta(dtype="float32", max_total_tokens=16384) as running:
        yield running


@pytest.fixture(scope="module")
def prompt(server: ManagedServer) -> list[int]:
    """Token ids of the conversation."""
    reply = httpx.post(f"{server.base_url}/tokenize", json={"messages": MESSAGES}, timeout=60)
    ids: list[int] = reply.json()["tokens"]
    return ids


async def ask_all(
    url: str, prompt: list[int], under_way: Callable[[], None] | None = None
) -> dict[str, Answer]:
    """Ask in every way at once. `under_way` is called when every stream has begun."""
    begun = dict.fromkeys(DIALECTS, 0)
    called = False

    def note(name: str) -> None:
        nonlocal called
        begun[name] += 1
        if under_way is not None and not called and min(begun.values()) >= KILL_AFTER:
            called = True
            under_way()

    async def ask(name: str, dialect: Dialect, is_stream: bool) -> Answer:
        body = dialect.body(prompt)
        if is_stream:
            body["stream"] = True
            if dialect.path in ("/v1/completions", "/v1/chat/completions"):
                body["stream_options"] = {"include_usage": True}
        async with session.post(url + dialect.path, json=body) as reply:
            assert reply.status == 200, await reply.text()
            if not is_stream:
                return dialect.read(await reply.json())
            decoder, events = SSEDecoder(), []
            async for part in reply.content.iter_any():
                for data in decoder.feed(part):
                    if data != b"[DONE]":
                        events.append(json.loads(data))
                        note(name)
            return dialect.gather(events)

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        ways = {
            f"{name}, {'streamed' if is_stream else 'whole'}": ask(name, dialect, is_stream)
            for name, dialect in DIALECTS.items()
            for is_stream in (True, False)
        }
        answers = dict(zip(ways, await asyncio.gather(*ways.values()), strict=True))
    assert under_way is None or called
    return answers


def check_same(answers: dict[str, Answer], prompt: list[int]) -> str:
    """The text that all have."""
    text = answers["chat, whole"].text
    for way, answer in answers.items():
        assert answer.text == text, way
        assert answer.usage is not None
        # How much was cached depends on who came first.
        assert answer.usage[:2] == (len(prompt), MAX_TOKENS), way
    return text


def test_all_say_the_same_also_when_the_engine_dies(
    server: ManagedServer, prompt: list[int]
) -> None:
    url = server.base_url
    expected = check_same(asyncio.run(ask_all(url, prompt)), prompt)
    warm = asyncio.run(ask_all(url, prompt))
    assert check_same(warm, prompt) == expected
    assert len({answer.usage for answer in warm.values()}) == 1
    (worker,) = actor_pids(launch_mark(server.pid), "WorkerActor")
    disturbed = asyncio.run(ask_all(url, prompt, lambda: os.kill(worker, signal.SIGKILL)))
    assert check_same(disturbed, prompt) == expected
