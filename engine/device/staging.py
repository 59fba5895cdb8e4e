"""Page-locked host memory for a device: inputs leave from it, results arrive in it.

Copies from and to pageable memory make the host wait for the device; these copies don't. Nothing
here knows CUDA: the caller makes the buffers, so the bookkeeping can be tested on CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.device.pinned import Event

ALIGNMENT = 16
_SMALLEST = 1 << 14

MakeBuffer = Callable[[int], Tensor]
"""Takes a number of bytes and returns uint8 [bytes] of page-locked memory."""


class Part(NamedTuple):
    """An array and the byte offset where it goes."""

    offset: int
    array: np.ndarray


def pack(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Aligned offsets for pieces of `sizes` bytes, and the number of bytes in all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


class _HostBuffer(NamedTuple):
    tensor: Tensor
    array: np.ndarray
    """The memory of `tensor` as uint8."""


def _make(make_buffer: MakeBuffer, size: int) -> _HostBuffer:
    """A buffer of the next power of two, so that few sizes exist."""
    tensor = make_buffer(max(_SMALLEST, 1 << (size - 1).bit_length()))
    return _HostBuffer(tensor, tensor.numpy())


class StagingRing:
    """Buffers that inputs are copied to the device from.

    A buffer is used again once the device has read it. If the oldest has not been read, one more is
    made instead of waiting. Their number is the largest number of copies under way at once.
    """

    def __init__(self, make_buffer: MakeBuffer, make_event: Callable[[], Event]) -> None:
        self._make_buffer = make_buffer
        self._make_event = make_event
        self._ring: deque[tuple[_HostBuffer, Event]] = deque()
        """Oldest copy first."""

    def __len__(self) -> int:
        return len(self._ring)

    def copy(self, parts: Sequence[Part], target: Tensor) -> None:
        """Start one copy that leaves every part in `target`, uint8 [bytes] on the device.

        Undefined bytes are written between the parts. The copy runs on the current stream.
        """
        size = target.numel()
        buffer, event = self._take(size)
        for offset, array in parts:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            buffer.array[offset : offset + flat.size] = flat
        target.copy_(buffer.tensor[:size], non_blocking=True)
        event.record()
        self._ring.append((buffer, event))

    def _take(self, size: int) -> tuple[_HostBuffer, Event]:
        if self._ring and self._ring[0][1].query():
            buffer, event = self._ring.popleft()
            if buffer.array.size >= size:
                return buffer, event
            # The buffer is too small for the present steps: a larger one replaces it.
        return _make(self._make_buffer, size), self._make_event()


class ResultBuffers:
    """Buffers that results are copied to; each belongs to one step until it is given back."""

    def __init__(self, make_buffer: MakeBuffer) -> None:
        self._make_buffer = make_buffer
        self._free: list[_HostBuffer] = []

    def take(self, like: Sequence[Tensor]) -> ResultBuffer:
        """Room for copies of the tensors `like`."""
        sizes = [t.numel() * t.element_size() for t in like]
        offsets, total = pack(sizes)
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.array.size < total:
            buffer = _make(self._make_buffer, max(total, 1))
        tensors = [
            buffer.tensor[offset : offset + size].view(t.dtype).view(t.shape)
            for t, offset, size in zip(like, offsets, sizes, strict=True)
        ]
        return ResultBuffer(tensors, buffer, self._free)


class ResultBuffer(NamedTuple):
    """One step's results on the host, once they are there."""

    tensors: list[Tensor]
    buffer: _HostBuffer
    free: list[_HostBuffer]

    def give_back(self) -> None:
        """Let the tensors be overwritten from now on. To be called once."""
        self.free.append(self.buffer)
