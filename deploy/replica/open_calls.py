"""`OpenCalls`: the requests of one engine replica whose Serve calls are open."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple


class _Call(NamedTuple):
    ingress: str
    done: asyncio.Future[None]


class OpenCalls:
    """Open calls by (reply_to, rid). A call's handler awaits it; it is ended from elsewhere.

    Calls of an ingress that is gone are abandoned: they stay open even after the request's end. To
    end a call, Ray (2.60) waits until the caller takes the answer, and the replica's event loop
    stands still meanwhile: a second for each call of a dead caller, for ever if the caller hangs.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], _Call] = {}
        self._gone: set[str] = set()

    def __len__(self) -> int:
        """Number of calls that somebody waits for."""
        return sum(call.ingress not in self._gone for call in self._calls.values())

    @property
    def num_abandoned(self) -> int:
        """Number of calls that nobody waits for."""
        return len(self._calls) - len(self)

    def open(self, reply_to: str, rid: int, ingress: str) -> asyncio.Future[None]:
        """Add a call. The result resolves when the request has ended; it raises what `fail` is
        given."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[(reply_to, rid)] = _Call(ingress, done)
        return done

    def close(self, reply_to: str, rid: int) -> None:
        """Remove a call; its handler is done with the request."""
        self._calls.pop((reply_to, rid), None)

    def end(self, keys: Iterable[tuple[str, int]]) -> None:
        """End the calls of requests that the scheduler is done with; unknown keys are ignored."""
        for key in keys:
            call = self._calls.get(key)
            if call is not None and call.ingress not in self._gone and not call.done.done():
                call.done.set_result(None)

    def abandon(self, ingress: str) -> list[tuple[str, int]]:
        """Abandon the calls of an ingress that is gone; they stay open. Returns their keys."""
        self._gone.add(ingress)
        return [key for key, call in self._calls.items() if call.ingress == ingress]

    def recall(self, ingress: str, error: Exception) -> None:
        """End the abandoned calls of an ingress that lives after all, with `error`."""
        if ingress in self._gone:
            self._gone.discard(ingress)
            self._fail([call for call in self._calls.values() if call.ingress == ingress], error)

    def fail(self, error: Exception) -> int:
        """End all calls that somebody waits for with copies of `error`; returns how many."""
        return self._fail([c for c in self._calls.values() if c.ingress not in self._gone], error)

    def _fail(self, calls: list[_Call], error: Exception) -> int:
        open_calls = [call for call in calls if not call.done.done()]
        for call in open_calls:
            # One exception raised by many handlers would gather all their tracebacks.
            call.done.set_exception(type(error)(*error.args))
        return len(open_calls)
