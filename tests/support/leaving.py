"""Clients that leave before their answer is complete, in every way that a client may."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["queue", "prefill", "decode"]
Leave = Literal["close", "half", "reset"]
PROMPT_TOKENS = {"queue": 4, "prefill": 6000, "decode": 4}
"""Six thousand token ids are a body beyond HAProxy's buffer of 16 KiB."""


@dataclass(frozen=True)
class Way:
    """How one client asks, and how it leaves."""

    reads: int
    """Number of packets: headers and body in one, or in two."""
    stream: bool
    phase: Phase
    keep_alive: bool
    """Whether the connection has brought an answer before."""
    leave: Leave
    """Close the connection; or close only the sending side and wait; or reset it."""

    def __str__(self) -> str:
        words = [f"{self.reads} reads", "stream" if self.stream else "whole", self.phase]
        return ", ".join([*words, *(["keep-alive"] if self.keep_alive else []), self.leave])


WAYS = [
    Way(*values)  # type: ignore[arg-type]
    for values in itertools.product(
        (1, 2),
        (False, True),
        ("queue", "prefill", "decode"),
        (False, True),
        ("close", "half", "reset"),
    )
]


def covering(ways: list[Way]) -> list[Way]:
    """Some of the ways, in which all pairs of values of two properties occur."""
    wanted = {pair for way in ways for pair in _pairs(way)}
    chosen: list[Way] = []
    while wanted:
        best = max(ways, key=lambda way: len(wanted & _pairs(way)))
        chosen.append(best)
        wanted -= _pairs(best)
    return chosen


def _pairs(way: Way) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(vars(way).items(), 2))


class Client:
    """One connection with one unanswered request."""

    def __init__(self, port: int, way: Way, number: int, max_tokens: int = 20_000) -> None:
        self._port = port
        self._way = way
        self._number = number
        self._max_tokens = max_tokens

    async def ask(self) -> None:
        """Connect and send; a stream in decode is read until its first bytes."""
        way = self._way
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        if way.keep_alive:
            await self._get_models()
        prompt = [7 + (self._number + i) % 2000 for i in range(PROMPT_TOKENS[way.phase])]
        body = {"prompt": prompt, "max_tokens": self._max_tokens, "stream": way.stream}
        payload = json.dumps({**body, "ignore_eos": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        ).encode()
        if way.reads == 1:
            self._writer.write(head + payload)
        else:
            self._writer.write(head)
            await self._writer.drain()
            await asyncio.sleep(0.1)
            self._writer.write(payload)
        await self._writer.drain()

    async def read_some(self) -> None:
        """Wait for the head of the answer and the first event."""
        await self._reader.readuntil(b"data: ")

    def leave(self) -> None:
        """Leave in this client's way."""
        match self._way.leave:
            case "half":
                self._writer.write_eof()
            case "reset":
                sock = self._writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._writer.transport.abort()
            case "close":
                self._writer.close()

    async def gone(self) -> None:
        """Close a connection whose sending side alone was closed."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _get_models(self) -> None:
        self._writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        lines = head.decode().lower().split("\r\n")
        (length,) = [int(line.split(":")[1]) for line in lines if line.startswith("content-length")]
        await self._reader.readexactly(length)
