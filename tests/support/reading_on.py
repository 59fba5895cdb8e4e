"""A client that comes back: it reads its stream on wherever it can, until it has all of it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

LIMIT_S = 120.0
PAUSE_S = 0.2
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
    times_lost: int = 0

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


async def read_through(
    read: Read, session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]
) -> None:
    """Post the request, and have `read` read it to its end through any losses."""
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            if not read.events:
                await _read(
                    read, session.post(url + path, json={**body, "stream": True}, headers=ACCEPT)
                )
            else:
                record = read.place.rpartition(":")[0]
                headers = {"last-event-id": read.place}
                at = f"{url}{path}/{record}?stream=true"
                await _read(read, session.get(at, headers=headers))
        except LOST:
            pass  # it comes back
        if read.is_whole():
            return
        assert time.monotonic() < until, read
        read.times_lost += 1
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
    await _read(
        read, session.post(url + path, json={**body, "stream": True}, headers=ACCEPT), events
    )


ACCEPT = {"accept": "text/event-stream"}


async def _read(read: Read, call: Any, most: int | None = None) -> None:
    """Take the events that come whole; behind `most` of them it leaves."""
    buffer = b""
    async with call as reply:
        if reply.status >= 500:
            await reply.read()
            return  # not now
        assert reply.status == 200, await reply.text()
        async for part in reply.content.iter_any():
            *events, buffer = (buffer + part).split(b"\n\n")
            for event in map(bytes.decode, events):
                if not event.startswith("id: "):
                    return  # an error: the stream is to be read on
                read.events.append(event)
                if len(read.events) == most:
                    return


def data_of(event: str) -> str:
    return event.rpartition("\ndata: ")[2]


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(item) for key, item in value.items() if key not in NEVER_THE_SAME}
    return [_without(item) for item in value] if isinstance(value, list) else value
