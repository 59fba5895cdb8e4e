"""A CUDA device that computes nothing and notices when the host would have to wait for it.

torch's `FakeTensorMode` gives tensors whose device is "cuda" on machines without a GPU. They have
shapes and types, so the code takes its CUDA branches, but no values. To ask for a value raises an
error, and so does every other operation at which CUDA makes the host wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from engine.device.clock import DeviceClock, StepTiming
from engine.device.queue import BufferDownload, Download, StagedQueue
from engine.layers.weights import DummySource
from engine.worker import model_runner

_READS_VALUES = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
}


class SyncError(AssertionError):
    """The host would wait for the device here."""


class FakeCuda(FakeTensorMode):
    """Inside it, tensors on "cuda:0" can be made and worked with.

    With `may_wait`, as while a model is loaded, only work that needs values is refused.
    """

    def __init__(self, *, may_wait: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.may_wait = may_wait

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if not self.may_wait:
            self._check(name, args, kwargs)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        real = [not isinstance(tensor, FakeTensor) for tensor in tensors]
        if name in ("aten::_pin_memory", "aten::pin_memory"):
            return pinned(args[0].clone())
        if name == "aten::copy_" and any(real) and not all(real):
            return args[0]  # a copy between the host's memory and memory without values
        device = _target_device(args, kwargs)
        if tensors and all(real) and device is None:
            result = func(*args, **kwargs)
        elif name in ("aten::to", "aten::_to_copy") and all(real):
            dtype = kwargs.get("dtype") or args[0].dtype
            with self:
                result = torch.empty(args[0].shape, dtype=dtype, device=device)
        else:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.is_view and is_pinned(args[0]):
            pinned(result)
        return result

    def _check(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        on_device = any(tensor.device.type == "cuda" for tensor in tensors)
        if name in _READS_VALUES and on_device:
            raise SyncError(f"{name} reads a value of the device")
        if name in ("aten::index", "aten::index_put_") and on_device:
            for index in args[1]:
                if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                    raise SyncError(f"{name} counts a mask that is on the device")
        if name == "aten::copy_":
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            _check_copy(name, args[1], args[0].device, blocking, args[0])
        if name in ("aten::_to_copy", "aten::to"):
            named = kwargs.get("device") or next(
                (arg for arg in args if isinstance(arg, torch.device)), args[0].device
            )
            blocking = not (kwargs.get("non_blocking") or any(arg is True for arg in args))
            _check_copy(name, args[0], torch.device(named), blocking, None)


def _target_device(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device | None:
    """Where an operator's result goes, if that is named and not the host."""
    device = kwargs.get("device") or next((a for a in args if isinstance(a, torch.device)), None)
    return None if device is None or torch.device(device).type == "cpu" else torch.device(device)


def _check_copy(
    name: str, source: Tensor, to: torch.device, blocking: bool, target: Tensor | None
) -> None:
    if source.device.type == to.type:
        return
    way = f"{name} from {source.device.type} to {to.type}"
    if blocking:
        raise SyncError(f"{way} waits for the copy")
    host = source if source.device.type == "cpu" else target
    if host is None or not is_pinned(host):
        raise SyncError(f"{way} waits for the device: the host's side is pageable")


def pinned(tensor: Tensor) -> Tensor:
    """Mark `tensor` as page-locked and return it."""
    tensor._is_page_locked = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: Any) -> bool:
    """Whether it is marked as page-locked."""
    return getattr(tensor, "_is_page_locked", False)


def _copy_(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`tensor.copy_(source)`, for the reason that `_getitem` has."""
    copied: Tensor = torch.ops.aten.copy_.default(tensor, source, non_blocking)
    return copied


def _getitem(tensor: Tensor, index: Any) -> Tensor:
    """`tensor[index]` made of operators: torch's own asks a CPU build for the CUDA device."""
    indices = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [i for i in indices if not isinstance(i, Tensor)]:
        at = next(n for n, i in enumerate(indices) if i is Ellipsis)
        given = sum(i is not None for i in indices) - 1
        indices[at : at + 1] = [slice(None)] * (tensor.dim() - given)
    dim = 0
    for i in indices:
        if i is None:
            tensor = tensor.unsqueeze(dim)
            dim += 1
        elif isinstance(i, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, i.start, i.stop, i.step or 1)
            dim += 1
        elif isinstance(i, Tensor):
            tensor = torch.ops.aten.index.Tensor(tensor, [None] * dim + [i])
            dim += 1
        else:
            tensor = torch.ops.aten.select.int(tensor, dim, i)
    return tensor


def _setitem(tensor: Tensor, index: Any, value: Any) -> None:
    """`tensor[index] = value` without masks."""
    assert not isinstance(index, Tensor)
    part = _getitem(tensor, index)
    if isinstance(value, Tensor):
        part.copy_(value)
    else:
        part.fill_(value)


class FakeEvent:
    """Happens when `done` is set; `FakeEvent.now` counts device milliseconds."""

    now = 0.0
    done = True

    def __init__(self) -> None:
        self.recorded_at: float | None = None
        self.waits = 0

    def record(self) -> None:
        self.recorded_at = FakeEvent.now

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waits += 1

    def elapsed_time(self, end_event: FakeEvent, /) -> float:
        assert self.recorded_at is not None and end_event.recorded_at is not None
        return end_event.recorded_at - self.recorded_at


class FakeCudaQueue(StagedQueue):
    """`CudaQueue` without streams. Host buffers are real, so what was staged can be looked at."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, _page_locked, FakeEvent)
        self._clock = DeviceClock(FakeEvent)

    def stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def join(self) -> None:
        pass

    def download(self, tensors: Sequence[Tensor]) -> Download:
        with unset_fake_temporarily():
            buffer = self.results.take(tensors)
        for source, target in zip(tensors, buffer.tensors, strict=True):
            pinned(target).copy_(source, non_blocking=True)
        return BufferDownload(buffer, FakeEvent())

    def protect_downloads(self) -> None:
        pass

    def begin(self) -> StepTiming:
        return self._clock.begin()


def use_fake_cuda(patch: pytest.MonkeyPatch) -> None:
    """Make workers work that are made inside `FakeCuda` with device "cuda" and dummy weights."""
    patch.setattr(model_runner, "make_queue", FakeCudaQueue)
    patch.setattr(FakeTensor, "__getitem__", _getitem)
    patch.setattr(FakeTensor, "__setitem__", _setitem)
    patch.setattr(FakeTensor, "copy_", _copy_)

    def zeros(
        self: DummySource,
        name: str,
        shape: tuple[int, ...],
        *,
        dim: int = 0,
        start: int = 0,
        count: int | None = None,
    ) -> Tensor:
        local = list(shape)
        local[dim] = shape[dim] - start if count is None else count
        return torch.zeros(local, dtype=self.dtype, device=self.device)

    patch.setattr(DummySource, "get", zeros)


def _page_locked(size: int) -> Tensor:
    with unset_fake_temporarily():
        return pinned(torch.zeros(size, dtype=torch.uint8))
