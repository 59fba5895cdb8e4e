"""The KV cache lies in huge pages on CPU."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from engine.device import huge_pages
from engine.device.huge_pages import zeros_in_huge_pages

SMAPS = Path("/proc/self/smaps")


def flags_at(address: int) -> str:
    """`VmFlags` of the mapping that holds `address`; "" if there is none."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text()):
        first, end = (int(bound, 16) for bound in mapping.split(" ", 1)[0].split("-"))
        if first <= address < end:
            return mapping.rsplit("VmFlags:", 1)[1]
    return ""


@pytest.mark.skipif(not SMAPS.exists(), reason="Linux only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_they_are_asked_for(dtype: torch.dtype) -> None:
    made = zeros_in_huge_pages((70_000, 3, 64), dtype)
    assert made.shape == (70_000, 3, 64) and made.dtype == dtype and made.is_contiguous()
    assert not made.view(torch.uint8).any()
    made.view(torch.uint8).fill_(1)
    address = made.data_ptr()
    assert "hg" in flags_at(address + 100_000).split()
    view = made[1]
    del made
    assert view.view(torch.uint8).all()  # a view keeps the memory
    del view
    assert "hg" not in flags_at(address + 100_000).split()


def test_small_ones_are_of_torch() -> None:
    made = zeros_in_huge_pages((3, 0, 64), torch.float32)
    assert made.shape == (3, 0, 64)
    assert not zeros_in_huge_pages((3, 64), torch.bfloat16).any()


def test_a_kernel_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mmap(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Mmap)
    made = zeros_in_huge_pages((70_000, 3, 64), torch.bfloat16)
    assert made.shape == (70_000, 3, 64) and not made.any()
