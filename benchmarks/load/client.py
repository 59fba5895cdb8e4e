"""A streaming client for OpenAI endpoints that notes when each event arrived.

While requests run it only splits the stream into events and reads the clock; JSON is parsed after
the last request has ended, because the client often shares its cores with the server under test.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import aiohttp

from deploy.http.sse_decoder import DONE, SSEDecoder

ERROR_BODY_CHARS = 300


class Event(NamedTuple):
    """One server-sent event: seconds on the monotonic clock, and its data."""

    time: float
    data: bytes


@dataclass
class RequestRecord:
    """What a request sent and what came back, as raw as it arrived. Times are in seconds."""

    due: float = 0.0
    """When the load generator wanted to send it."""
    sent: float = 0.0
    ended: float = 0.0
    events: list[Event] = field(default_factory=list)
    error: str | None = None


class RequestResult(NamedTuple):
    """One request's figures. Times are seconds; on an error only `error` and `e2e` mean anything.

    `itl` holds the gap before each content chunk but the first. `chunk_tokens` holds the number of
    tokens of each content chunk; it is empty if the server reports neither token ids nor
    continuous usage.
    """

    error: str | None
    client_wait: float
    ttft: float
    tpot: float | None
    e2e: float
    itl: list[float]
    chunks: int
    chunk_tokens: list[int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    token_ids: list[int]


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], record: RequestRecord
) -> None:
    """POST `body` and fill `record`. Failures end in `record.error`, never in an exception."""
    decoder = SSEDecoder()
    payload = json.dumps(body).encode()
    record.sent = time.perf_counter()
    try:
        async with session.post(
            url, data=payload, headers={"Content-Type": "application/json"}
        ) as reply:
            if reply.status != 200:
                text = (await reply.text(errors="replace"))[:ERROR_BODY_CHARS]
                record.error = f"HTTP {reply.status}: {text}"
            else:
                async for chunk in reply.content.iter_any():
                    now = time.perf_counter()
                    record.events += [Event(now, data) for data in decoder.feed(chunk)]
    except TimeoutError:
        record.error = "timed out"
    except (aiohttp.ClientError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.ended = time.perf_counter()


async def list_models(base_url: str, headers: dict[str, str]) -> list[str]:
    """Ids from `/v1/models`.

    Raises `aiohttp.ClientError` if the endpoint is not there or does not answer with 200.
    """
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{base_url}/v1/models") as reply,
    ):
        reply.raise_for_status()
        return [model["id"] for model in (await reply.json())["data"]]


def analyse(record: RequestRecord, expected_tokens: int | None = None) -> RequestResult:
    """Turn a record into figures.

    A content chunk is one that carries text or token ids. The empty role chunk that opens a chat
    stream and the final chunk with only a finish reason are not content chunks. The first content
    chunk gives TTFT; TPOT = (last - first content chunk) / (output tokens - 1), None for one token.

    A stream is an error if it carries an error event, if the finish reason, the usage or the final
    [DONE] is missing, or if it has another number of tokens than `expected_tokens`.
    """
    content = _Content()
    error = record.error or _read_events(record.events, content)
    output_tokens = _count(content.usage, "completion_tokens")
    times = content.times
    if error is None and expected_tokens is not None and output_tokens != expected_tokens:
        error = f"{output_tokens} output tokens instead of {expected_tokens}"
    if error is None and output_tokens and not times:
        error = f"{output_tokens} output tokens, but no chunk with content"
    first, last = (times[0], times[-1]) if times else (record.ended, record.ended)
    details = (content.usage or {}).get("prompt_tokens_details")
    return RequestResult(
        error=error,
        client_wait=record.sent - record.due,
        ttft=first - record.sent,
        tpot=(last - first) / (output_tokens - 1) if output_tokens > 1 else None,
        e2e=record.ended - record.sent,
        itl=[after - before for before, after in pairwise(times)],
        chunks=len(times),
        chunk_tokens=content.chunk_tokens if len(content.chunk_tokens) == len(times) else [],
        prompt_tokens=_count(content.usage, "prompt_tokens"),
        output_tokens=output_tokens,
        cached_tokens=_count(details, "cached_tokens"),
        token_ids=content.token_ids,
    )


@dataclass
class _Content:
    """What the events of one stream said; `times` has one entry per content chunk."""

    times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: dict[str, object] | None = None


def _read_events(events: list[Event], content: _Content) -> str | None:
    """Fill `content` and return what is wrong with the stream, or None."""
    finished = False
    for arrived, data in events:
        if data == DONE:
            if not finished:
                return "stream has no finish_reason"
            if content.usage is None:
                return "stream has no usage (stream_options.include_usage is not honoured)"
            return None
        try:
            message = json.loads(data)
        except ValueError:
            return f"event is no JSON: {data[:80]!r}"
        if "error" in message:
            return f"error event: {json.dumps(message['error'])[:ERROR_BODY_CHARS]}"
        tokens_before = _count(content.usage, "completion_tokens")
        content.usage = message.get("usage") or content.usage
        for choice in message.get("choices", ()):
            finished = finished or choice.get("finish_reason") is not None
            ids = choice.get("token_ids") or []
            if not ids and not _text(choice):
                continue
            content.times.append(arrived)
            content.token_ids += ids
            if ids:
                content.chunk_tokens.append(len(ids))
            elif message.get("usage"):
                tokens_now = _count(content.usage, "completion_tokens")
                content.chunk_tokens.append(tokens_now - tokens_before)
    return "stream ended without [DONE]"


def _text(choice: dict[str, object]) -> str:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return str(delta.get("content") or delta.get("reasoning_content") or "")
    return str(choice.get("text") or "")


def _count(counts: object, key: str) -> int:
    """`counts[key]` where a server gives it, else 0 (usage and its details are optional)."""
    value = counts.get(key) if isinstance(counts, dict) else None
    return value if isinstance(value, int) else 0
