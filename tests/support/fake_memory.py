"""A device for which tests set the memory and its holders."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.device.memory import DeviceMemory, DeviceProcess

GIB = 1 << 30


@dataclass
class FakeMemory(DeviceMemory):
    """Answers `allocated` with the next of `stages` at each call (the last one stays)."""

    stages: list[int] = field(default_factory=lambda: [0])
    highest: int = 0
    size: int = 80 * GIB
    others: list[DeviceProcess] = field(default_factory=list)
    outside: list[int] = field(default_factory=lambda: [0])
    """Bytes held outside torch: `elsewhere` answers with the next, the last one stays."""
    resets: int = 0

    def total(self) -> int:
        return self.size

    def free(self) -> int:
        return self.size - _next(self.outside, keep=True) - self.stages[0]

    def elsewhere(self) -> int:
        return _next(self.outside)

    def allocated(self) -> int:
        return _next(self.stages)

    def reserved(self) -> int:
        return self.stages[0]

    def peak(self) -> int:
        return self.highest

    def reset_peak(self) -> None:
        self.resets += 1

    def release(self) -> None:
        pass

    def other_processes(self) -> list[DeviceProcess]:
        return self.others


def _next(values: list[int], *, keep: bool = False) -> int:
    return values[0] if keep or len(values) == 1 else values.pop(0)
