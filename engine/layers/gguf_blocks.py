"""`grouped_of`: blocks of GGUF files as `Grouped`, without loss. The layouts are those of ggml's
`ggml-common.h`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.checkpoint.gguf.tensor_types import TensorType
from engine.layers.grouped import Grouped


def grouped_of(kind: TensorType, rows: Tensor) -> Grouped:
    """The matrix of `rows`, uint8 [out, bytes], whose blocks are of the type `kind`, which isn't a
    plain one."""
    return _READERS[kind.name](_Blocks(rows, kind.block_bytes))


class _Blocks:
    """uint8 [out, blocks, bytes of a block]"""

    def __init__(self, rows: Tensor, num_bytes: int) -> None:
        self.data = rows.view(rows.shape[0], -1, num_bytes)

    def bytes(self, start: int, stop: int) -> Tensor:
        return self.data[:, :, start:stop]

    def halves(self, start: int) -> Tensor:
        """float16 [out, blocks]"""
        return self.bytes(start, start + 2).contiguous().view(torch.float16).squeeze(-1)

    def nibbles(self, start: int, stop: int) -> Tensor:
        """The low halves of all bytes of a block, then the high ones."""
        packed = self.bytes(start, stop)
        return torch.cat([packed & 15, packed >> 4], -1)

    def bits(self, start: int) -> Tensor:
        """The 32 bits of four bytes, [out, blocks, 32]."""
        shifts = torch.arange(8, dtype=torch.uint8, device=self.data.device)
        return ((self.bytes(start, start + 4).unsqueeze(-1) >> shifts) & 1).flatten(2)


def _q8_0(blocks: _Blocks) -> Grouped:
    signed = blocks.bytes(2, 34)
    return Grouped((signed ^ 128).flatten(1), 8, 128, 32, blocks.halves(0))


def _q4_0(blocks: _Blocks) -> Grouped:
    return Grouped(blocks.nibbles(2, 18).flatten(1), 4, 8, 32, blocks.halves(0))


def _q4_1(blocks: _Blocks) -> Grouped:
    numbers = blocks.nibbles(4, 20).flatten(1)
    return Grouped(numbers, 4, 0, 32, blocks.halves(0), -blocks.halves(2))


def _q5_0(blocks: _Blocks) -> Grouped:
    numbers = blocks.nibbles(6, 22) | (blocks.bits(2) << 4)
    return Grouped(numbers.flatten(1), 5, 16, 32, blocks.halves(0))


def _q5_1(blocks: _Blocks) -> Grouped:
    numbers = blocks.nibbles(8, 24) | (blocks.bits(4) << 4)
    return Grouped(numbers.flatten(1), 5, 0, 32, blocks.halves(0), -blocks.halves(2))


def _q4_k(blocks: _Blocks) -> Grouped:
    return _with_minima(blocks, 4, _pairs(blocks.bytes(16, 144)))


def _q5_k(blocks: _Blocks) -> Grouped:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.data.device).unsqueeze(-1)
    high = (blocks.bytes(16, 48).unsqueeze(2) >> shifts) & 1
    return _with_minima(blocks, 5, _pairs(blocks.bytes(48, 176)) | (high.flatten(2) << 4))


def _q6_k(blocks: _Blocks) -> Grouped:
    out, count = blocks.data.shape[:2]
    low = blocks.bytes(0, 128).reshape(out, count, 2, 1, 64)
    low = torch.cat([low & 15, low >> 4], 3).view(out, count, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=low.device).unsqueeze(-1)
    high = (blocks.bytes(128, 192).reshape(out, count, 2, 1, 32) >> shifts) & 3
    codes = blocks.bytes(192, 208).contiguous().view(torch.int8).flatten(1)
    numbers = (low | (high << 4)).flatten(1)
    return Grouped(numbers, 6, 32, 16, blocks.halves(208), scale_codes=codes)


def _pairs(packed: Tensor) -> Tensor:
    """Nibbles of 32 bytes each: the low halves are 32 numbers, the high ones the next."""
    out, count, num_bytes = packed.shape
    groups = packed.reshape(out, count, num_bytes // 32, 1, 32)
    return torch.cat([groups & 15, groups >> 4], 3).flatten(2)


def _with_minima(blocks: _Blocks, bits: int, numbers: Tensor) -> Grouped:
    """The eight scales and minima of a block have 6 bits each: twice four bytes with 6 bits of one
    and 2 high ones of another, and four bytes with the low halves of those."""
    first, second, low = blocks.bytes(4, 8), blocks.bytes(8, 12), blocks.bytes(12, 16)
    scales = torch.cat([first & 63, (low & 15) | ((first >> 2) & 48)], -1)
    minima = torch.cat([second & 63, (low >> 4) | ((second >> 2) & 48)], -1)
    return Grouped(
        numbers.flatten(1),
        bits,
        0,
        32,
        blocks.halves(0),
        mins=blocks.halves(2),
        scale_codes=scales.view(torch.int8).flatten(1),
        min_codes=minima.view(torch.int8).flatten(1),
    )


_READERS: dict[str, Callable[[_Blocks], Grouped]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
