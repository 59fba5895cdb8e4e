"""Staging, results and clock of a device, with events that come to pass when the test says so."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from engine.device import clock as device_clock
from engine.device.clock import DeviceClock
from engine.device.queue import BufferDownload, CpuQueue
from engine.device.staging import ALIGNMENT, Part, ResultBuffers, StagingRing, pack
from tests.support.fake_cuda import FakeCudaQueue, FakeEvent

CPU = torch.device("cpu")


def make_buffer(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


class Events:
    """Makes events that are done once `finish` has been called."""

    def __init__(self) -> None:
        self.made: list[FakeEvent] = []

    def __call__(self) -> FakeEvent:
        event = FakeEvent()
        event.done = False
        self.made.append(event)
        return event

    def finish(self) -> None:
        for event in self.made:
            event.done = True


def test_pack_aligns_every_piece() -> None:
    offsets, total = pack([8, 1, 0, 33])
    assert offsets == [0, 16, 32, 32] and total == 80
    assert all(offset % ALIGNMENT == 0 for offset in offsets)


ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.zeros(0, np.int64),
    np.array([7, 8, 9], np.int32),
    np.array([[1.5, 2.5]], np.float32),
    np.array([True, False]),
    np.arange(10, dtype=np.int64)[::2],
]


@pytest.mark.parametrize("kind", ["cpu", "staged"])
def test_uploads_keep_values_types_and_shapes(kind: str) -> None:
    queue = CpuQueue() if kind == "cpu" else FakeCudaQueue(CPU)
    for array, tensor in zip(ARRAYS, queue.upload(ARRAYS), strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_fill_writes_parts_at_their_places() -> None:
    for queue in (CpuQueue(), FakeCudaQueue(CPU)):
        target = torch.zeros(64, dtype=torch.uint8)
        queue.fill([Part(16, np.array([3], np.int64)), Part(40, np.array([5], np.int32))], target)
        assert target[16:24].view(torch.int64).tolist() == [3]
        assert target[40:44].view(torch.int32).tolist() == [5]


def test_a_staging_buffer_isnt_overwritten_before_it_was_read() -> None:
    events = Events()
    made: list[torch.Tensor] = []

    def noted(size: int) -> torch.Tensor:
        made.append(make_buffer(size))
        return made[-1]

    ring = StagingRing(noted, events)
    target = torch.zeros(8, dtype=torch.uint8)
    for value in range(3):
        ring.copy([Part(0, np.array([value], np.int64))], target)
    # Nobody has read any: three buffers, each with its own content, and nobody waited.
    assert len(made) == len(ring) == 3
    assert [int(buffer[0]) for buffer in made] == [0, 1, 2]
    assert not any(event.waits for event in events.made)
    events.finish()
    for value in range(3, 9):
        ring.copy([Part(0, np.array([value], np.int64))], target)
        assert len(made) == 3
        for event in events.made:
            event.done = True


def test_a_staging_buffer_grows() -> None:
    events = Events()
    ring = StagingRing(make_buffer, events)
    large = np.arange(100_000, dtype=np.int64)
    target = torch.zeros(large.nbytes, dtype=torch.uint8)
    ring.copy([Part(0, large[:4])], torch.zeros(32, dtype=torch.uint8))
    events.finish()
    ring.copy([Part(0, large)], target)
    np.testing.assert_array_equal(target.view(torch.int64).numpy(), large)
    assert len(ring) == 1


def test_result_buffers_belong_to_one_step_until_given_back() -> None:
    buffers = ResultBuffers(make_buffer)
    like = [
        torch.zeros(3, dtype=torch.int64),
        torch.zeros((2, 2)),
        torch.zeros(3, dtype=torch.bool),
    ]
    first, second = buffers.take(like), buffers.take(like)
    for ours, wanted in zip(first.tensors, like, strict=True):
        assert ours.shape == wanted.shape and ours.dtype == wanted.dtype
    first.tensors[0].fill_(1)
    second.tensors[0].fill_(2)
    assert first.tensors[0].tolist() == [1, 1, 1]
    memory = first.tensors[0].data_ptr()
    first.give_back()
    assert buffers.take(like).tensors[0].data_ptr() == memory
    large = [torch.zeros(100_000)]
    second.give_back()
    assert buffers.take(large).tensors[0].shape == (100_000,)


def test_waiting_for_a_download_that_is_there_asks_nothing_of_the_device() -> None:
    done = FakeEvent()
    download = BufferDownload(ResultBuffers(make_buffer).take([torch.zeros(1)]), done)
    assert download.is_done()
    download.wait()
    assert done.waits == 0
    done.done = False
    assert not download.is_done()
    download.wait()
    assert done.waits == 1


def test_downloads_on_cpu_are_copies() -> None:
    source = torch.arange(3)
    download = CpuQueue().download([source])
    source.fill_(9)
    assert download.wait()[0].tolist() == [0, 1, 2]


def at(milliseconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the device's clock and the host's, which runs 1000 s ahead."""
    FakeEvent.now = milliseconds
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + milliseconds / 1e3)


def test_steps_queued_behind_others_start_when_the_device_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = Events()
    clock = DeviceClock(events)
    at(100.0, monkeypatch)
    first = clock.begin()
    first.end()
    first.ended.recorded_at = 110.0  # type: ignore[attr-defined]
    at(101.0, monkeypatch)
    second = clock.begin()  # launched at once, but the device is busy until 110
    second.end()
    second.started.recorded_at = 110.5  # type: ignore[attr-defined]
    second.ended.recorded_at = 130.5  # type: ignore[attr-defined]
    assert not first.is_over()
    events.finish()
    at(131.0, monkeypatch)
    assert first.is_over() and first.span() == pytest.approx((1000.1, 1000.11))
    assert second.span() == pytest.approx((1000.1105, 1000.1305))
    # Idle now: the next one starts when it is launched.
    at(200.0, monkeypatch)
    third = clock.begin()
    third.end()
    assert third.span().started_at == pytest.approx(1000.2)


def test_an_old_anchor_is_replaced_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's clock runs 1 % fast: without a new anchor, times would run away."""
    events = Events()
    clock = DeviceClock(events)
    now = 0.0
    timing = None
    for _ in range(300):
        now += 1000.0
        monkeypatch.setattr(time, "monotonic", lambda host=1000.0 + now / 1e3: host)
        FakeEvent.now = now * 1.01
        timing = clock.begin()
        timing.end()
        events.made[-1].done = False  # never idle
        timing.span()
    assert timing is not None
    error = timing.span().started_at - (1000.0 + now / 1e3)
    assert abs(error) < 1.01 * device_clock.ANCHOR_MAX_AGE_S / 100 + 0.1


def test_timing_on_cpu_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    at(0.0, monkeypatch)
    timing = CpuQueue().begin()
    at(5.0, monkeypatch)
    timing.end()
    assert timing.is_over() and timing.span() == pytest.approx((1000.0, 1000.005))
