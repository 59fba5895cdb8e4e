"""A client that comes back: it reads its stream on wherever it can, until it has all of it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import aiohttp

LIMIT_S = 120.0
PAUSE_S = 0.2
NOT_TAKEN = "408"
"""A loss: HAProxy's status for a request that comes late, as its client is busy with others."""
NOT_KEPT = "it isn't kept"
"""A loss: the store was too busy, so that the stream has no ids. Its client begins again."""
MAX_OPENING = 20
"""Connections of a client that are opened at once: it is slower than the server, which ends those
that say nothing for long."""
LOST = (aiohttp.ClientError, OSError, asyncio.IncompleteReadError)
NEVER_THE_SAME = frozenset(
    {
        *("id", "created", "created_at", "completed_at", "call_id", "item_id", "request_id"),
        *("cached_tokens", "cache_read_input_tokens", "input_tokens", "e2e_latency"),
    }
)
"""Fields that say when something was asked, or what the prefix cache had."""


@dataclass
class Read:
    """A stream as one client got it."""

    events: list[str] = field(default_factory=list)
    """With their ids."""
    losses: list[str] = field(default_factory=list)
    """What its client saw, each time the stream ended early."""

    def is_whole(self) -> bool:
        """Whether the last event came."""
        if not self.events:
            return False
        last = data_of(self.events[-1])
        if last == "[DONE]":
            return True
        kind = json.loads(last).get("type", "")
        return kind in ("response.completed", "response.incomplete", "message_stop")

    @property
    def place(self) -> str:
        """Where to go on: the id of the last event."""
        return self.events[-1].split("\n")[0].removeprefix("id: ")

    def contents(self) -> list[Any]:
        """What the events say, by sequence, without what differs from run to run."""
        found: dict[Any, list[Any]] = {}
        for event in self.events:
            data = data_of(event)
            said = data if data == "[DONE]" else json.loads(data)
            sequence = None
            if isinstance(said, dict) and len(said.get("choices") or ()) == 1:
                sequence = said["choices"][0]["index"]
            found.setdefault(sequence, []).append(_without(said))
        return [found[sequence] for sequence in sorted(found, key=str)]


def difference(read: Read, want: Read) -> str:
    """The first events of a sequence that differ; "" if none do."""
    sequences: Any = zip_longest(read.contents(), want.contents(), fillvalue=[])
    for one, other in sequences:
        for number, (event, wanted) in enumerate(zip_longest(one, other)):
            if event != wanted:
                return f"event {number}: {event}\nwanted: {wanted}"
    return ""


async def read_through(
    read: Read,
    session: aiohttp.ClientSession,
    url: str,
    path: str,
    body: dict[str, Any],
    opening: asyncio.Semaphore | None = None,
) -> None:
    """Post the request, and have `read` read it to its end through any losses. It is one of those
    that open their connections by turns."""
    opening = opening or asyncio.Semaphore(1)
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            if not read.events:
                call = _post(session, url + path, body)
            else:
                record = read.place.rpartition(":")[0]
                headers = {"last-event-id": read.place}
                at = f"{url}{path}/{record}?stream=true"
                call = session.get(at, headers=headers)
            async with opening:
                reply = await call
            lost = await _read(read, reply)
        except LOST as error:  # it comes back
            lost = repr(error)
        if read.is_whole():
            return
        assert time.monotonic() < until, read
        read.losses.append(lost)
        await asyncio.sleep(PAUSE_S)


async def read_some(
    read: Read,
    session: aiohttp.ClientSession,
    url: str,
    path: str,
    body: dict[str, Any],
    *,
    events: int,
) -> None:
    """Post the request, and cut the connection as soon as this many events are there."""
    await _read(read, await _post(session, url + path, body), events)


def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    headers = {"accept": "text/event-stream"}
    return session.post(url, json={**body, "stream": True}, headers=headers)


async def _read(read: Read, reply: aiohttp.ClientResponse, most: int | None = None) -> str:
    """Take the events that come whole; behind `most` of them it leaves. Returns how the stream
    ended."""
    buffer = b""
    async with reply:
        if str(reply.status) == NOT_TAKEN:
            return NOT_TAKEN
        if reply.status >= 500:
            return f"{reply.status}: {await reply.text()}"  # not now
        assert reply.status == 200, await reply.text()
        async for part in reply.content.iter_any():
            *events, buffer = (buffer + part).split(b"\n\n")
            for event in map(bytes.decode, events):
                if not event.startswith("id: "):
                    # Or else an error: the stream is to be read on.
                    return event if read.events else NOT_KEPT
                read.events.append(event)
                if len(read.events) == most:
                    return "it was left"
    return "its end came early"


def data_of(event: str) -> str:
    return event.rpartition("\ndata: ")[2]


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(item) for key, item in value.items() if key not in NEVER_THE_SAME}
    return [_without(item) for item in value] if isinstance(value, list) else value
