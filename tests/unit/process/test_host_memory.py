"""What was freed goes back to the system where the C library can do that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.process.host_memory import give_back_freed


@pytest.mark.parametrize("can", [True, False])
def test_freed_memory_is_given_back(can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    library: Any = SimpleNamespace(malloc_trim=asked.append) if can else SimpleNamespace()
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    give_back_freed()
    assert asked == ([0] if can else [])
