"""Copies between host and device for which the host doesn't wait.

CUDA copies from page-locked ("pinned") host memory while the host goes on. A copy from or to other
host memory makes the host wait for the device.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream (`torch.cuda.Event`)."""

    def record(self) -> None:
        """Put it behind everything launched so far on the current stream."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy `array` to `device` without waiting for it.

    Use this for arrays that a step needs now and then; torch keeps the pinned memory until it was
    read. Arrays that every step needs go through the worker's `DeviceQueue`.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
