"""The kernels of `engine.attention.triton_kernels` against torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.page_table import packed_size, page_table
from tests.support import torch_kernels
from tests.support.kernels import same_bits

FP8 = torch.float8_e4m3fn
UNUSED = -7
"""What memory holds that no kernel may write."""


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    pool_dtype: torch.dtype


class Rotation:
    """Arguments of `rotate_and_store`, and what has to come out. Slot 0 is padding."""

    def __init__(
        self, sizes: Heads, tokens: int, device: torch.device, *, padding: int = 0
    ) -> None:
        """The last `padding` tokens are written to the padding slot, and aren't looked at."""
        heads, kv_heads, dim, dtype, pool_dtype = sizes
        self.real = tokens - padding
        whole = torch.randn(tokens, heads + 2 * kv_heads + 1, dim, device=device)
        if pool_dtype == FP8:
            whole[:, heads:] *= 200  # beyond 448 too
        self.whole = whole.to(dtype)
        """q, k and v of each token, with a gap behind them."""
        self.before = self.whole.clone()
        self.q, self.k, self.v, _ = self.whole.split([heads, kv_heads, kv_heads, 1], 1)
        self.positions = torch.randint(0, 512, (tokens,), device=device)
        angles = torch.rand(512, dim // 2, device=device) * 6.3
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        slots = tokens + 40
        self.locs = torch.randperm(slots - 1, device=device)[:tokens] + 1
        self.locs[self.real :] = 0
        shape = (slots, kv_heads, dim)
        self.keys, self.values = (
            torch.full(shape, UNUSED, device=device).to(pool_dtype) for _ in range(2)
        )

    def fill(self, values: Tensor) -> None:
        """Other queries, keys and values [T, heads and gap, dim]."""
        self.whole.copy_(values)
        self.before.copy_(values)

    def run(self, kernels: Any) -> None:
        kernels.rotate_and_store(
            self.q,
            self.k,
            self.v,
            self.positions,
            self.cos_sin,
            self.keys,
            self.values,
            self.locs,
        )

    def check(self) -> None:
        wanted = self.before.clone()
        num_heads, num_kv_heads = self.q.shape[1], self.k.shape[1]
        q, k, v, _ = wanted.split([num_heads, num_kv_heads, num_kv_heads, 1], 1)
        keys, values = (torch.full_like(x.float(), UNUSED).to(x.dtype) for x in (self.keys,) * 2)
        torch_kernels.rotate_and_store(
            q, k, v, self.positions, self.cos_sin, keys, values, self.locs
        )
        close(self.whole[: self.real], wanted[: self.real])
        assert same_bits(self.whole[:, num_heads:], self.before[:, num_heads:])
        close(self.keys[1:], keys[1:])
        assert same_bits(self.values[1:], values[1:])


def close(found: Tensor, wanted: Tensor) -> None:
    """Equal but for the rounding of each number to its type, by one unit in the last place."""
    assert found.dtype == wanted.dtype
    info = torch.finfo(found.dtype)
    torch.testing.assert_close(
        found.double(),
        wanted.double(),
        rtol=info.eps,
        atol=max(1e-6, info.smallest_normal * info.eps),
        equal_nan=True,
    )


def check_page_indices(
    kernels: Any,
    lengths: Sequence[tuple[int, int]],
    window: int | None,
    page_size: int,
    device: torch.device,
) -> None:
    """`lengths`: tokens in the cache and new ones, of each row."""
    generator = np.random.default_rng(len(lengths))
    seq_lens, query_lens = (np.array(values, np.int64) for values in zip(*lengths, strict=True))
    most = int(seq_lens.max()) // page_size + 2
    pages = generator.permutation((len(lengths) + 2) * most).reshape(-1, most)
    table = (pages[:, :, None] * page_size + np.arange(page_size)).reshape(len(pages), -1)
    rows = generator.permutation(len(pages))[: len(lengths)]
    found = page_table(rows, query_lens, seq_lens, window, page_size, pinned=False)
    assert found.packed.numel() == packed_size(len(rows))
    memory = torch.full((found.packed.numel() + 3,), UNUSED, dtype=torch.int32, device=device)
    out = torch.full((found.num_pages + 9,), UNUSED, dtype=torch.int32, device=device)
    kernels.page_indices(
        found.upload(memory),
        len(rows),
        found.longest,
        torch.from_numpy(table.astype(np.int32)).to(device),
        page_size,
        out[: found.num_pages],
    )
    wanted: list[int] = []
    for row, (seq_len, query_len) in zip(rows, lengths, strict=True):
        first = 0 if window is None else max(0, seq_len - query_len + 1 - window) // page_size
        end = -(-seq_len // page_size)
        wanted += pages[row, first:end].tolist()
    assert out.tolist() == wanted + [UNUSED] * 9
    assert memory[-3:].tolist() == [UNUSED] * 3
