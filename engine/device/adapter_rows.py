"""`AdapterRows`: which adapter each row of a step has, on the host and on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import to_device
from engine.protocol.step import Int64Array, IntArray


@dataclass
class AdapterRows:
    """Slots of the adapters of rows, -1 for none."""

    host: IntArray
    """int32 [rows]"""
    slots: Tensor
    """The same on the device."""
    is_captured: bool = False
    """Whether this is what a graph reads: then `slots` alone will be as they are in a replay."""
    changes_experts: bool = False
    """Whether a row's adapter has matrices for a mixture's experts."""
    _groups: list[tuple[int, Tensor]] | None = None

    @classmethod
    def of(cls, host: IntArray, device: torch.device) -> AdapterRows:
        """Rows whose slots are copied to the device."""
        return cls(host, to_device(host, device))

    def __len__(self) -> int:
        return len(self.host)

    def part(self, rows: slice) -> AdapterRows:
        """Some neighbouring rows."""
        return replace(self, host=self.host[rows], slots=self.slots[rows], _groups=None)

    def take(self, rows: Int64Array) -> AdapterRows:
        """These rows [n]."""
        found = AdapterRows.of(self.host[rows], self.slots.device)
        return replace(found, changes_experts=self.changes_experts)

    @property
    def groups(self) -> list[tuple[int, Tensor]]:
        """Each slot with its rows, int64 [n] on the device. The device is not waited for."""
        if self.is_captured:
            raise ValueError("a graph can't be captured for certain adapters")
        if self._groups is None:
            present = np.unique(self.host[self.host >= 0]).tolist()
            self._groups = [
                (slot, to_device(np.flatnonzero(self.host == slot), self.slots.device))
                for slot in present
            ]
        return self._groups
