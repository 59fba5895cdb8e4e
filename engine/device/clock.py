"""When steps ran on the device, in the host's time.

A CUDA event says only how long after another event it happened. So the clock has an anchor: an
event whose time on the host is known.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from engine.device.pinned import Event

ANCHOR_MAX_AGE_S = 60.0


class TimedEvent(Event, Protocol):
    """An event that keeps the device's time (`torch.cuda.Event(enable_timing=True)`)."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to `end_event` of its kind; both must have happened."""


class Span(NamedTuple):
    """Start and end in monotonic seconds of this process."""

    started_at: float
    ended_at: float


class StepTiming(ABC):
    """One step's time on the device, from the call that made it."""

    @abstractmethod
    def end(self) -> None:
        """Note that the step's last kernel has been launched."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the device is done with the step."""

    @abstractmethod
    def span(self) -> Span:
        """When the device ran the step. Call this only once it `is_over`."""


class HostTiming(StepTiming):
    """Timing of a step on a device whose work is done when the call returns."""

    def __init__(self) -> None:
        self._started_at = self._ended_at = time.monotonic()

    def end(self) -> None:
        self._ended_at = time.monotonic()

    def is_over(self) -> bool:
        return True

    def span(self) -> Span:
        return Span(self._started_at, self._ended_at)


class _Anchor(NamedTuple):
    event: TimedEvent
    at: float


@dataclass
class EventTiming(StepTiming):
    """The time between two events of one stream."""

    clock: DeviceClock
    anchor: _Anchor
    started: TimedEvent
    ended: TimedEvent

    def end(self) -> None:
        self.ended.record()
        self.clock.ended(self)

    def is_over(self) -> bool:
        return self.ended.query()

    def span(self) -> Span:
        started_at = self.anchor.at + self.anchor.event.elapsed_time(self.started) / 1e3
        self.clock.seen(self.ended)
        return Span(started_at, started_at + self.started.elapsed_time(self.ended) / 1e3)


class DeviceClock:
    """Makes the timings of one stream's steps.

    The anchor is the start of a step that was launched on an idle device, which begins at once. A
    device that is never idle gets a new anchor every `ANCHOR_MAX_AGE_S`: the end of a step that was
    just seen. That is late by at most the time between two looks. Without new anchors, the drift of
    the clocks and the float32 milliseconds of `elapsed_time` would make errors that can be seen.
    """

    def __init__(self, make_event: Callable[[], TimedEvent]) -> None:
        self._make_event = make_event
        self._anchor: _Anchor | None = None
        self._newest_end: TimedEvent | None = None
        self._open = 0
        """Steps that have begun and whose end isn't launched (delayed samples)."""

    def begin(self) -> EventTiming:
        """A timing that starts behind everything launched so far."""
        idle = self._open == 0 and (self._newest_end is None or self._newest_end.query())
        self._open += 1
        started = self._make_event()
        started.record()
        if idle or self._anchor is None:
            self._anchor = _Anchor(started, time.monotonic())
        return EventTiming(self, self._anchor, started, self._make_event())

    def ended(self, timing: EventTiming) -> None:
        """Note that the end of `timing` has been launched."""
        self._open -= 1
        self._newest_end = timing.ended

    def seen(self, event: TimedEvent) -> None:
        """Note that the host has just seen that `event` happened."""
        now = time.monotonic()
        if self._anchor is None or now - self._anchor.at > ANCHOR_MAX_AGE_S:
            self._anchor = _Anchor(event, now)
