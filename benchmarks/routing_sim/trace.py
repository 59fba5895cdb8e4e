"""A workload's requests as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.kvcache import hash_pages

Tokens = NDArray[np.int32]

PAGE_SIZE = 16
MS_PER_STEP = 20.0
"""Nominal decode step: when a follow-up request is sent, and the pooled cache's second touch."""


@dataclass(slots=True)
class TraceRequest:
    """One request.

    Fields:
        number: position in the trace.
        arrival: seconds.
        segments: the prompt in pieces, which requests share.
        output: tokens that the replica will emit.
        counted: it arrives in the measured window.
        adapter: the adapter that it asks for; "" is none.
    """

    arrival: float
    segments: tuple[Tokens, ...]
    output: Tokens
    number: int = -1
    counted: bool = False
    adapter: str = ""
    num_prompt: int = field(init=False)
    _hashes: NDArray[np.uint64] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.num_prompt = sum(map(len, self.segments))

    @property
    def nominal_end(self) -> float:
        """Time of its end on an idle replica, in seconds."""
        return self.arrival + len(self.output) * MS_PER_STEP / 1e3

    def prompt(self) -> Tokens:
        return np.concatenate(self.segments)

    def whole(self) -> Tokens:
        """All tokens: the prompt, then the output."""
        return np.concatenate([*self.segments, self.output])

    def page_hashes(self) -> NDArray[np.uint64]:
        """The engine's own hashes, computed once for all policies that see this trace."""
        if self._hashes is None:
            self._hashes = hash_pages(self.prompt(), PAGE_SIZE, self.adapter)
        return self._hashes


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; those in [start, end) s are measured."""

    requests: list[TraceRequest]
    start: float
    end: float

    @property
    def counted(self) -> list[TraceRequest]:
        return [request for request in self.requests if request.counted]


def make_trace(requests: Sequence[TraceRequest], warm_s: float, window_s: float) -> Trace:
    """Sort, number and mark requests; those outside [0, warm_s + window_s) are dropped."""
    end = warm_s + window_s
    kept = sorted((r for r in requests if 0 <= r.arrival < end), key=lambda r: r.arrival)
    for number, request in enumerate(kept):
        request.number = number
        request.counted = request.arrival >= warm_s
    return Trace(kept, warm_s, end)
