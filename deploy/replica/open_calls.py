"""`OpenCalls`: the requests of one engine replica whose Serve calls are open."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple


class _Call(NamedTuple):
    ingress: str
    done: asyncio.Future[None]


class OpenCalls:
    """By (reply_to, rid); a call is awaited by its handler and ended from elsewhere.

    Calls of an ingress that is gone are abandoned: they stay open, whatever becomes of the request.
    To end one, Ray (2.60) waits for its caller to take the answer, with the replica's event loop
    standing still: a second for each call of a dead caller, for ever with one that hangs.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], _Call] = {}
        self._gone: set[str] = set()

    def __len__(self) -> int:
        """Those that somebody waits for."""
        return sum(call.ingress not in self._gone for call in self._calls.values())

    @property
    def num_abandoned(self) -> int:
        """Those that nobody waits for."""
        return len(self._calls) - len(self)

    def open(self, reply_to: str, rid: int, ingress: str) -> asyncio.Future[None]:
        """Resolves when the request has ended; raises what `fail` is given."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[(reply_to, rid)] = _Call(ingress, done)
        return done

    def close(self, reply_to: str, rid: int) -> None:
        """The handler is through with the request."""
        self._calls.pop((reply_to, rid), None)

    def end(self, keys: Iterable[tuple[str, int]]) -> None:
        """The scheduler is done with these requests; unknown ones are ignored."""
        for key in keys:
            call = self._calls.get(key)
            if call is not None and call.ingress not in self._gone and not call.done.done():
                call.done.set_result(None)

    def abandon(self, ingress: str) -> list[tuple[str, int]]:
        """The ingress is gone: the requests of its calls, which stay open."""
        self._gone.add(ingress)
        return [key for key, call in self._calls.items() if call.ingress == ingress]

    def recall(self, ingress: str, error: Exception) -> None:
        """The ingress lives: if it was thought gone, its calls end with `error` after all."""
        if ingress in self._gone:
            self._gone.discard(ingress)
            self._fail([call for call in self._calls.values() if call.ingress == ingress], error)

    def fail(self, error: Exception) -> int:
        """End all calls that somebody waits for with copies of `error`; how many."""
        return self._fail([c for c in self._calls.values() if c.ingress not in self._gone], error)

    def _fail(self, calls: list[_Call], error: Exception) -> int:
        open_calls = [call for call in calls if not call.done.done()]
        for call in open_calls:
            # One exception raised by many handlers would gather all their tracebacks.
            call.done.set_exception(type(error)(*error.args))
        return len(open_calls)
