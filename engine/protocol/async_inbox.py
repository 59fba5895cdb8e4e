"""`AsyncInbox`: an `Inbox` read by an asyncio loop, with one wake-up per burst of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from engine.protocol.transport import Inbox

MAX_AT_ONCE = 32
"""Messages taken before others in the loop get a turn."""


class AsyncInbox:
    """Calls `on_message` in the running loop for every message that arrives."""

    def __init__(self, host: str, on_message: Callable[[Any], None]) -> None:
        self._inbox = Inbox(host)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fds = self._inbox.fds
        for fd in self._fds:
            self._loop.add_reader(fd, self._on_readable, fd)
        self._going_on = True
        """True while the loop will call `_drain` anyway; then `_on_readable` has nothing to do."""
        self._loop.call_soon(self._drain)

    @property
    def address(self) -> str:
        """The address that others send to."""
        return self._inbox.address

    def close(self) -> None:
        """Stop reading; unread messages are dropped."""
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._inbox.close()

    def _on_readable(self, fd: int) -> None:
        if not self._going_on and self._inbox.has_message_at((fd,)):
            self._drain()

    def _drain(self) -> None:
        self._going_on = False
        for _ in range(MAX_AT_ONCE):
            if self._inbox.closed:
                return
            message = self._inbox.recv(0.0)
            if message is None:
                return
            self._on_message(message)
        self._going_on = True
        self._loop.call_soon(self._drain)
