"""A step that takes long is told from one that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.device.queue import MAX_MARKS, StagedQueue
from engine.worker.base import DeviceProgress
from engine.worker.step_beat import StepBeat
from tests.support.fake_cuda import FakeCudaQueue, FakeEvent


class Bench:
    """A beat with a clock and a device of the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.device = DeviceProgress(0.0, is_busy=False)
        self.beat = StepBeat(lambda: self.now)

    def look(self, times: int = 1) -> float | None:
        """The standstill after some looks, 0.3 s apart."""
        for _ in range(times):
            self.now += 0.3
            still_s = self.beat.standstill_s()
        return still_s

    def follow(self) -> None:
        self.beat.follow(lambda: self.device)


@contextmanager
def step_in_a_thread(bench: Bench, body: Callable[[], None]) -> Iterator[None]:
    """`body` runs as a step on a worker's thread meanwhile."""
    entered = threading.Event()

    def run() -> None:
        bench.follow()
        bench.beat.work()
        entered.set()
        body()
        bench.beat.rest(waits_for_device=False)

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(20)
    yield
    thread.join(20)


def test_a_step_that_waits_in_the_kernel_stands_still() -> None:
    bench, gate = Bench(), threading.Event()

    with step_in_a_thread(bench, lambda: assert_set(gate)):
        while not (bench.look() or 0.0):  # until the thread waits
            pass
        assert (bench.look(10) or 0.0) > 2.0
        gate.set()
    assert bench.look() is None


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(60)


def test_a_step_that_computes_for_a_minute_does_not() -> None:
    bench, over, turns = Bench(), threading.Event(), threading.Semaphore(0)

    def compute() -> None:
        number = 0
        while not over.is_set():
            number += 1
            turns.release()

    with step_in_a_thread(bench, compute):
        for _ in range(200):
            turns.acquire()
            while turns.acquire(blocking=False):
                pass
            turns.acquire()  # it has computed since
            assert bench.look() == 0.0
        over.set()


def test_a_worker_without_steps_has_none_that_stand() -> None:
    bench = Bench()
    assert bench.look(20) is None
    bench.follow()
    assert bench.look(20) is None


def test_a_device_that_passes_marks_works_and_one_that_passes_none_hangs() -> None:
    bench = Bench()
    bench.follow()
    bench.beat.rest(waits_for_device=True)
    for done in range(20):
        bench.device = DeviceProgress(float(done), is_busy=True)
        assert bench.look() == 0.0
    assert bench.look(10) == pytest.approx(3.0)
    bench.beat.progressed()  # a result came after all
    assert bench.look() == 0.0


def test_a_thread_that_spins_for_a_busy_device_does_not_hide_its_hang() -> None:
    """CUDA spins while its queue is full."""
    bench, over = Bench(), threading.Event()
    bench.device = DeviceProgress(3.0, is_busy=True)

    def spin() -> None:
        while not over.is_set():
            pass

    with step_in_a_thread(bench, spin):
        bench.look()
        assert bench.look(10) == pytest.approx(3.0)
        over.set()


def test_marks_are_passed_in_order_and_old_ones_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[FakeEvent] = []

    class Recorded(FakeEvent):
        def __init__(self) -> None:
            super().__init__()
            self.passed = False
            events.append(self)

        def query(self) -> bool:
            return self.passed

    queue = StagedQueue.__new__(FakeCudaQueue)
    StagedQueue.__init__(queue, torch.device("cpu"), torch.empty, Recorded)
    assert queue.marks_passed() == (0, False)
    for _ in range(3):
        queue.mark()
    events[0].passed = True  # type: ignore[attr-defined]
    assert queue.marks_passed() == (1, True)
    for _ in range(MAX_MARKS):
        queue.mark()
    for event in events:
        event.passed = True  # type: ignore[attr-defined]
    assert queue.marks_passed() == (3 + MAX_MARKS, False)
