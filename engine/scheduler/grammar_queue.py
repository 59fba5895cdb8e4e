"""`GrammarQueue`: requests that wait until their grammar is compiled (SGLang's grammar queue)."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

from engine.constraints.grammar_compiler import GrammarCompiler
from engine.protocol.messages import AddRequest


class _Held(NamedTuple):
    """`arrival` in seconds of the loop's clock."""

    request: AddRequest
    arrival: float
    compiled: Future[Any]


class GrammarQueue:
    """Stands before `Scheduler.add`, which compiles at once what isn't compiled yet.

    A compilation runs in a thread of its own and may take tenths of a second. Steps go on
    meanwhile. Requests leave when their grammar is compiled, whether it could be or not.
    """

    def __init__(self, grammars: GrammarCompiler | None) -> None:
        self._grammars = grammars
        self._held: list[_Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: AddRequest, arrival: float) -> bool:
        """Whether the request waits here; False if its grammar is compiled, or it has none."""
        constraint = request.sequence.params.constraint
        if self._grammars is None or constraint is None or constraint.kind != "grammar":
            return False
        compiled = self._grammars.prepare(constraint.payload)
        if compiled is None:
            return False
        self._held.append(_Held(request, arrival, compiled))
        return True

    def take(self) -> list[tuple[AddRequest, float]]:
        """Requests that may be added now, with the times of their arrival."""
        ready = [held for held in self._held if held.compiled.done()]
        if ready:
            taken = {id(held) for held in ready}
            self._held = [held for held in self._held if id(held) not in taken]
        return [(held.request, held.arrival) for held in ready]

    def drop(self, reply_to: str, rid: int | None = None) -> None:
        """Forget a request, or every request of a reader."""
        self._held = [
            held
            for held in self._held
            if held.request.reply_to != reply_to or rid not in (None, held.request.rid)
        ]
