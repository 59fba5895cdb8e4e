"""`EventStream`: the body of a streamed reply."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Send

from deploy.http.eager import run_eagerly

_ID = re.compile(rb"^id: .*\n", re.MULTILINE)
HEADERS = Headers(
    {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # nginx would gather chunks
    }
)


class EventStream:
    """Sends events where they arise, so that a token costs no wake-up of its request's task.

    This works as long as the server takes events at once. When the server makes us wait because
    the client doesn't read, the stream is behind. A task of its own then sends what came meanwhile.
    `send` begins and ends the reply; `send_chunk` sends everything between.
    """

    def __init__(
        self,
        send: Send,
        send_chunk: Send,
        is_kept: Awaitable[bool] | None = None,
        *,
        outlives: bool = False,
    ) -> None:
        """The reply begins when `is_kept` is known; if it is false, events have no ids. `outlives`:
        it goes on without a client that leaves, instead of raising `ClientDisconnect`."""
        self._is_kept = is_kept
        self._outlives = outlives
        self._send = send
        self._send_chunk = send_chunk
        self._more: Callable[[], bytes] = bytes
        self.catching_up: asyncio.Task[None] | None = None
        """Set while the stream is behind: `write` must not be called."""
        self.has_begun = False
        """Whether the status has been sent."""
        self.waiting_since: float | None = None
        """Monotonic seconds: since when an event waits for the client to take it; else None."""

    def write(self, events: bytes, catch_up: Callable[[], bytes]) -> None:
        """Send events. If sending has to wait, `catch_up` is then asked for more until it has none.

        Raises `ClientDisconnect`, as all methods do.
        """
        self._more = catch_up
        if self.has_begun:
            sending = self._send_chunk(_body(events, more=True))
        else:
            sending = self._begin(events)
        try:
            rest = run_eagerly(sending)  # type: ignore[arg-type]  # ASGI says Awaitable
        except OSError as error:
            self._note_gone(error)
            return
        if rest is not None:
            self.catching_up = asyncio.get_running_loop().create_task(self._catch_up(rest))

    def drop(self) -> None:
        """Nothing is sent any more, nor waits to be."""
        self._send = self._send_chunk = _nowhere
        self.waiting_since = None
        if self.catching_up is not None:
            self.catching_up.cancel()
            self.catching_up = asyncio.create_task(self._catch_up(_nowhere({})))

    def _note_gone(self, error: OSError) -> None:
        if not self._outlives:
            raise ClientDisconnect from error
        self._send = self._send_chunk = _nowhere

    async def flush(self) -> None:
        """Return when nothing waits to be sent."""
        while (task := self.catching_up) is not None:
            await asyncio.wait((task,))
            if task is self.catching_up:  # it has failed
                task.result()

    async def end(self, events: bytes) -> None:
        """Send the last events and end the reply."""
        await self.flush()
        self.waiting_since = time.monotonic()
        try:
            if not self.has_begun:
                await self._begin(b"")
            await self._send(_body(events, more=False))
        except OSError as error:
            self._note_gone(error)
        self.waiting_since = None

    async def close(self) -> None:
        """Stop the task that catches up; nothing more is sent."""
        if self.catching_up is not None:
            self.catching_up.cancel()
            await asyncio.gather(self.catching_up, return_exceptions=True)

    async def _begin(self, events: bytes) -> None:
        self.has_begun = True
        if self._is_kept is not None and not await asyncio.shield(self._is_kept):
            events = _ID.sub(b"", events)
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS.raw})
        await self._send_chunk(_body(events, more=True))

    async def _catch_up(self, sending: Awaitable[None]) -> None:
        try:
            self.waiting_since = time.monotonic()
            await sending
            while events := self._more():
                self.waiting_since = time.monotonic()
                await self._send_chunk(_body(events, more=True))
        except OSError as error:
            self._note_gone(error)
            self._more()
        self.waiting_since = self.catching_up = None


async def _nowhere(message: Message) -> None:
    """Where what is sent to a client that left goes."""


def _body(events: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": events, "more_body": more}
