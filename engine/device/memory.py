"""What a worker can ask about the memory of its device."""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

_PROCESS = re.compile(r"process\s+(\d+) uses\s+([\d.]+) MB")


class DeviceProcess(NamedTuple):
    """A process that holds memory of the device."""

    pid: int
    num_bytes: int


class DeviceMemory(ABC):
    """All figures are bytes. "Allocated" is what live tensors of this process take; "reserved" is
    what torch holds for them and for later ones."""

    @abstractmethod
    def total(self) -> int:
        """Memory of the device."""

    @abstractmethod
    def free(self) -> int:
        """Memory that no process holds."""

    @abstractmethod
    def allocated(self) -> int:
        """What this process's tensors take now."""

    @abstractmethod
    def reserved(self) -> int:
        """What this process's torch holds now."""

    @abstractmethod
    def peak(self) -> int:
        """The largest value of `allocated` since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin to measure `peak` anew."""

    @abstractmethod
    def release(self) -> None:
        """Give back what torch reserved and doesn't use. Waits for the device."""

    @abstractmethod
    def other_processes(self) -> list[DeviceProcess]:
        """Other processes that hold memory, as far as the driver tells (not across containers)."""

    def elsewhere(self) -> int:
        """Bytes held by other processes, and by this one outside torch: CUDA's context, NCCL."""
        return max(0, self.total() - self.free() - self.reserved())


class CudaMemory(DeviceMemory):
    """Memory of one CUDA device, as torch and the driver tell it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def release(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def other_processes(self) -> list[DeviceProcess]:
        try:
            text = torch.cuda.list_gpu_processes(self.device)
        except Exception as error:  # NVML's errors share no base; without it there is less advice
            logger.debug("the driver doesn't tell who uses the GPU: %s", error)
            return []
        return parse_processes(text, os.getpid())


def parse_processes(text: str, own_pid: int) -> list[DeviceProcess]:
    """Read the text of `torch.cuda.list_gpu_processes`, which says nothing if NVML's bindings are
    missing. Returns the other processes, the largest first."""
    found = [
        DeviceProcess(int(pid), int(float(megabytes) * 2**20))
        for pid, megabytes in _PROCESS.findall(text)
    ]
    return sorted((p for p in found if p.pid != own_pid), key=lambda p: -p.num_bytes)
