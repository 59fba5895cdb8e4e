"""Pinned memory that plans are written to, never while a copy from it is still to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.device.pinned import Event


class PlanRing:
    """`depth` pinned buffers of `num_bytes`, used in turn.

    FlashInfer's planner fills a pinned buffer on the host and starts a copy from it to the device.
    The next plan is made while that copy may still wait behind the steps before it, so it takes
    the next buffer. An event behind each copy tells when the buffer is free again; with a buffer
    for every plan that can be on its way, taking one doesn't wait.
    """

    def __init__(
        self,
        depth: int,
        num_bytes: int,
        device: torch.device,
        make_event: Callable[[], Event] | None = None,
    ) -> None:
        on_cuda = device.type == "cuda"
        if make_event is None and on_cuda:
            make_event = torch.cuda.Event
        self.buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(depth)
        ]
        self._events = [make_event() for _ in range(depth)] if make_event is not None else []
        self._next = 0
        self.waits = 0
        """How often `take` had to wait for the copy from a buffer."""

    @contextmanager
    def take(self) -> Iterator[Tensor]:
        """A free buffer, uint8 [num_bytes]; at the end its copy must be on the current stream."""
        index = self._next
        self._next = (index + 1) % len(self.buffers)
        # An event that was never recorded counts as past.
        if self._events and not self._events[index].query():
            self.waits += 1
            self._events[index].synchronize()
        yield self.buffers[index]
        if self._events:
            self._events[index].record()
