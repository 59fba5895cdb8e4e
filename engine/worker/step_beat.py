"""`StepBeat`: for how long a worker's steps have stood still, asked from another thread.

A long step is no hang. What tells them apart is progress inside a step:

- While the worker's thread is in a step's code, the CPU time of that thread grows if it computes. A
  thread that waits in the kernel, for a lock or for a device, gets none.
- While the device has work, its own marks are passed (`ModelWorker.device_progress`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from engine.process.pulse import Pulse
from engine.worker.base import DeviceProgress


class StepBeat:
    """The worker's thread tells what it does; one other thread looks, twice a second or more.

    Only the time between two looks at which nothing had moved counts as standing still, so the
    first look after a pause of the looker's says little.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._device: Callable[[], DeviceProgress] | None = None
        self._cpu_clock: int | None = None
        self._is_working = False
        self._waits_for_device = False
        self._num_done = 0
        self._seen: tuple[float, ...] = ()
        self._pulse: Pulse | None = None
        """Of the steps held now; None while there are none."""

    def follow(self, device: Callable[[], DeviceProgress]) -> None:
        """Begin: call this in the thread that runs the steps."""
        self._device = device
        self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())

    def work(self) -> None:
        """Note that the thread enters a step's code. Not for a look at results that aren't ready:
        looking takes CPU time, too."""
        self._is_working = True

    def rest(self, *, waits_for_device: bool) -> None:
        """Note that the thread is done with it; `waits_for_device`: it looks for results now."""
        self._waits_for_device = waits_for_device
        self._is_working = False

    def progressed(self) -> None:
        """Note that a message came or a result went."""
        self._num_done += 1

    def standstill_s(self) -> float | None:
        """Seconds without progress of the steps that the worker holds; None if it holds none."""
        if self._device is None or not (self._is_working or self._waits_for_device):
            self._pulse = None
            return None
        now = self._clock()
        device = self._device()
        computes = self._is_working and not device.is_busy
        assert self._cpu_clock is not None
        cpu_s = time.clock_gettime(self._cpu_clock) if computes else 0.0
        seen = (float(self._num_done), device.done, cpu_s)
        if self._pulse is None:
            self._pulse = Pulse(now)
        silent_s = self._pulse.tick(now)
        if seen == self._seen:
            return silent_s
        self._seen = seen
        self._pulse.beat()
        return 0.0
