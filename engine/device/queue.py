"""How a worker's host side talks to its device without waiting for it.

On CUDA all kernels of a worker run on one forward stream, in the order of its steps. Inputs come by
one copy per step from page-locked memory; results leave by a second stream, so that the next step
needn't wait for them. On CPU a call returns when its work is done, and none of this costs time.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.device.clock import DeviceClock, HostTiming, StepTiming
from engine.device.pinned import Event
from engine.device.staging import Part, ResultBuffer, ResultBuffers, StagingRing, pack

MAX_MARKS = 1024
"""Marks that are kept while nobody asks for them; two steps of a model of 100 layers have 200."""


class Download(ABC):
    """Tensors on their way to the host."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""

    @abstractmethod
    def wait(self) -> list[Tensor]:
        """The tensors on the host, valid until `release`."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back. To be called once."""


class DeviceQueue(ABC):
    """One device as its worker sees it. Only `Download.wait` waits for it."""

    @abstractmethod
    def stream(self) -> contextlib.AbstractContextManager[object]:
        """A context. Work launched inside runs after all work launched inside before."""

    @abstractmethod
    def join(self) -> None:
        """Make later work inside `stream` wait for work launched outside of it so far."""

    @abstractmethod
    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Copies of `arrays` on the device, made by one transfer."""

    @abstractmethod
    def fill(self, parts: Sequence[Part], target: Tensor) -> None:
        """Copy `parts` into `target`, uint8 [bytes], by one transfer; its other bytes become
        undefined."""

    @abstractmethod
    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Start copying `tensors` to the host."""

    @abstractmethod
    def protect_downloads(self) -> None:
        """Let work launched from now on overwrite tensors that are being downloaded: it waits for
        the downloads."""

    @abstractmethod
    def begin(self) -> StepTiming:
        """The timing of a step that starts behind everything launched so far."""

    @abstractmethod
    def mark(self) -> None:
        """Put a mark behind all work launched so far inside `stream`."""

    @abstractmethod
    def marks_passed(self) -> tuple[int, bool]:
        """The number of the newest mark that the device has passed, and whether there are marks
        that it hasn't. One thread besides the worker's may ask."""


class CpuDownload(Download):
    """Copies, because the next step may overwrite the originals."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.clone() for tensor in tensors]

    def is_done(self) -> bool:
        return True

    def wait(self) -> list[Tensor]:
        return self._tensors

    def release(self) -> None:
        pass


class CpuQueue(DeviceQueue):
    """The host as its own device: work is done when the call returns."""

    def stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def join(self) -> None:
        pass

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Tensors on the arrays' own memory."""
        return [torch.from_numpy(array) for array in arrays]

    def fill(self, parts: Sequence[Part], target: Tensor) -> None:
        memory = target.numpy()
        for offset, array in parts:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            memory[offset : offset + flat.size] = flat

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return CpuDownload(tensors)

    def protect_downloads(self) -> None:
        pass

    def begin(self) -> StepTiming:
        return HostTiming()

    def mark(self) -> None:
        pass

    def marks_passed(self) -> tuple[int, bool]:
        return 0, False


class BufferDownload(Download):
    """Copies into a pinned buffer; they are complete when an event has happened."""

    def __init__(self, buffer: ResultBuffer, done: Event) -> None:
        self._buffer = buffer
        self._done = done

    def is_done(self) -> bool:
        return self._done.query()

    def wait(self) -> list[Tensor]:
        if not self._done.query():
            self._done.synchronize()
        return self._buffer.tensors

    def release(self) -> None:
        self._buffer.give_back()


class StagedQueue(DeviceQueue):
    """Uploads through a ring of pinned buffers. Calls CUDA only through its arguments."""

    def __init__(
        self,
        device: torch.device,
        make_buffer: Callable[[int], Tensor],
        make_event: Callable[[], Event],
    ) -> None:
        self.device = device
        self.staging = StagingRing(make_buffer, make_event)
        self.results = ResultBuffers(make_buffer)
        self._make_event = make_event
        self._num_marks = 0
        self._num_passed = 0
        self._marks: deque[tuple[int, Event]] = deque(maxlen=MAX_MARKS)
        """Marks that the device may not have passed yet, in order."""

    def mark(self) -> None:
        event = self._make_event()
        event.record()
        self._num_marks += 1
        self._marks.append((self._num_marks, event))

    def marks_passed(self) -> tuple[int, bool]:
        while self._marks and self._marks[0][1].query():
            # A full ring drops its oldest mark by itself meanwhile: the number is what counts.
            self._num_passed = self._marks.popleft()[0]
        return self._num_passed, bool(self._marks)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        offsets, total = pack([array.nbytes for array in arrays])
        memory = torch.empty(total, dtype=torch.uint8, device=self.device)
        self.fill([Part(*pair) for pair in zip(offsets, arrays, strict=True)], memory)
        return [
            memory[offset : offset + array.nbytes].view(torch_dtype(array)).view(array.shape)
            for offset, array in zip(offsets, arrays, strict=True)
        ]

    def fill(self, parts: Sequence[Part], target: Tensor) -> None:
        self.staging.copy(parts, target)


class CudaQueue(StagedQueue):
    """One GPU: a forward stream, a copy stream, page-locked buffers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, _pinned, _event)
        self._forward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copy = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        """End of the newest download."""
        self._clock = DeviceClock(_timed_event)

    def stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._forward)

    def join(self) -> None:
        self._forward.wait_stream(torch.cuda.current_stream(self.device))

    def download(self, tensors: Sequence[Tensor]) -> Download:
        sources = [tensor.contiguous() for tensor in tensors]
        buffer = self.results.take(sources)
        computed, done = _event(), _event()
        computed.record()
        with torch.cuda.stream(self._copy):
            self._copy.wait_event(computed)
            for source, target in zip(sources, buffer.tensors, strict=True):
                target.copy_(source, non_blocking=True)
                # The allocator mustn't hand the memory out again before it was read.
                source.record_stream(self._copy)
            done.record()
        self._copied = done
        return BufferDownload(buffer, done)

    def protect_downloads(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied)

    def begin(self) -> StepTiming:
        return self._clock.begin()


def make_queue(device: torch.device) -> DeviceQueue:
    """The queue of a worker on `device`."""
    return CudaQueue(device) if device.type == "cuda" else CpuQueue()


def torch_dtype(array: np.ndarray) -> torch.dtype:
    """torch's type for the elements of `array`."""
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
