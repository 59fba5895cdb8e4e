"""A client that reads many token streams at little cost: raw HTTP/1.1 on asyncio protocols.

It shares the cores with the server under test, so it parses nothing. It counts the chunks with text
by searching for bytes, and notes when they came. That takes 0.3 to 0.7 µs per chunk. SSEDecoder
would take 1.2 to 1.4 µs, and would first need the body without HTTP's chunk sizes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from deploy.http import sse_decoder

CHUNK_MARK = b'"index":0,"text":'
"""Bytes in every chunk of `/v1/completions` with one choice, and nowhere else."""
DONE = b"data: " + sse_decoder.DONE
_STATUS = re.compile(rb"HTTP/1\.1 (\d+)")
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_KEEP = max(len(CHUNK_MARK), len(DONE)) - 1


@dataclass
class Stream:
    """One reply. Times are monotonic seconds; `arrivals` holds (time, chunks) of every read."""

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    """Tokens by the server's usage; 0 until the stream has ended."""

    @property
    def chunks(self) -> int:
        """Number of chunks with text that came so far."""
        return sum(count for _, count in self.arrivals)


class StreamError(RuntimeError):
    """A server didn't do what the benchmark needs."""


class Connection(asyncio.Protocol):
    """A connection that sends the next request as soon as a stream has ended.

    `next_body` gives the body of each request, None to stop. `streams` are its replies.
    """

    def __init__(self, host: str, next_body: Callable[[], bytes | None], headers: str = "") -> None:
        """`headers`: more of them, each with its line end."""
        self.streams: list[Stream] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._host = host
        self._headers = headers
        self._next_body = next_body
        self._transport: asyncio.Transport | None = None
        self._kept = b""
        self._before = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        stream = self.streams[-1]
        if not stream.arrivals:
            status = _STATUS.match(data)
            if status is not None and status[1] != b"200":
                self._fail(f"HTTP {status[1].decode()}: {data[-300:]!r}")
                return
        window = self._kept + data
        stream.arrivals.append((now, window.count(CHUNK_MARK)))
        if DONE in window:
            usage = _USAGE.findall(self._before + data)
            if not usage:
                self._fail("a stream ended without usage")
                return
            stream.tokens, stream.ended = int(usage[-1]), now
            self._kept = self._before = b""
            self._send()
        else:
            self._kept, self._before = window[-_KEEP:], data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self._fail(f"the server closed a connection: {exc}")

    def close(self) -> None:
        """Cut the connection, also during a stream."""
        if not self.closed.done():
            self.closed.set_result(None)
        if self._transport is not None:
            self._transport.abort()

    def _send(self) -> None:
        body = self._next_body()
        if body is None:
            self.close()
            return
        assert self._transport is not None
        self.streams.append(Stream(time.monotonic()))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"{self._headers}\r\n"
        )
        self._transport.write(head.encode() + body)

    def _fail(self, message: str) -> None:
        if not self.closed.done():
            self.closed.set_exception(StreamError(message))
        if self._transport is not None:
            self._transport.abort()


async def connect(
    port: int, next_body: Callable[[], bytes | None], headers: str = ""
) -> Connection:
    """An open connection to 127.0.0.1:`port`, its first request sent. For `headers` see there."""
    host = f"127.0.0.1:{port}"
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: Connection(host, next_body, headers), "127.0.0.1", port
    )
    return connection
