"""`OpenCalls`: the requests of one engine replica whose Serve calls are open."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple


class _Call(NamedTuple):
    ingress: str
    done: asyncio.Future[None]


class OpenCalls:
    """By (client, rid); a call is awaited by its handler and ended from elsewhere."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, client: str, rid: int, ingress: str) -> asyncio.Future[None]:
        """Resolves when the request has ended; raises what `fail` is given."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[(client, rid)] = _Call(ingress, done)
        return done

    def close(self, client: str, rid: int) -> None:
        """The handler is through with the request."""
        self._calls.pop((client, rid), None)

    def end(self, keys: Iterable[tuple[str, int]]) -> None:
        """The scheduler is done with these requests; unknown ones are ignored."""
        for key in keys:
            call = self._calls.get(key)
            if call is not None and not call.done.done():
                call.done.set_result(None)

    def fail(self, error: Exception, ingress: str | None = None) -> int:
        """End all calls, or those that came from `ingress`, with copies of `error`; how many."""
        failed = 0
        for call in self._calls.values():
            if (ingress is None or call.ingress == ingress) and not call.done.done():
                # One exception raised by many handlers would gather all their tracebacks.
                call.done.set_exception(type(error)(*error.args))
                failed += 1
        return failed
