"""Which pages of the KV cache some rows read: compressed rows, as FlashInfer takes them.

Row i reads the pages `indices[indptr[i] : indptr[i + 1]]`, and of the last one
`last_page_len[i]` slots. The device finds `indices` itself, from two numbers per row
(`engine.attention.triton_kernels.page_indices`): to copy the whole list would mean megabytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.protocol.step import Int64Array

ALIGNMENT = 4
"""Each row of `PageTable.packed` begins at a multiple of so many numbers."""


class PageTable(NamedTuple):
    """All but the page numbers, for n rows."""

    packed: Tensor
    """int32 [4, at least n + 1]: what the device needs, in one copy. Pinned for CUDA, so that the
    copy doesn't wait. Its rows: `indptr`, `last_page_len`, the requests' rows of `req_to_token`,
    and each one's first position there that is read."""
    kv_lens: Tensor
    """int32 [n]: tokens in the row's pages."""
    num_pages: int
    longest: int
    """Pages of the row that has most."""

    @property
    def indptr(self) -> Tensor:
        """int32 [n + 1]"""
        return self.packed[0, : len(self.kv_lens) + 1]

    @property
    def last_page_len(self) -> Tensor:
        """int32 [n], 1 to page_size"""
        return self.packed[1, : len(self.kv_lens)]

    def upload(self, memory: Tensor) -> Tensor:
        """A copy of `packed` at the front of `memory`, int32 [`packed_size(n)` or more] on the
        device, for which the host doesn't wait."""
        front = memory[: self.packed.numel()].view(self.packed.shape)
        return front.copy_(self.packed, non_blocking=True)


def packed_size(num_rows: int) -> int:
    """Numbers in `PageTable.packed`."""
    return 4 * _width(num_rows)


def page_table(
    rows: Int64Array,
    query_lens: Int64Array,
    seq_lens: Int64Array,
    window: int | None,
    page_size: int,
    *,
    pinned: bool,
) -> PageTable:
    """Pages that the last `query_lens` of `seq_lens` tokens [n] of request `rows` can see.

    Pages wholly before the first query's `window` are left out.
    """
    first_page = np.zeros(len(rows), dtype=np.int64)
    if window is not None:
        first_page = np.maximum(seq_lens - query_lens + 1 - window, 0) // page_size
    counts = -(-seq_lens // page_size) - first_page
    n = len(rows)
    packed = torch.empty((4, _width(n)), dtype=torch.int32, pin_memory=pinned)
    host = packed.numpy()
    host[0, 0] = 0
    np.cumsum(counts, out=host[0, 1 : n + 1])
    host[1, :n] = (seq_lens - 1) % page_size + 1
    host[2, :n] = rows
    host[3, :n] = first_page * page_size
    kv_lens = torch.from_numpy((seq_lens - host[3, :n]).astype(np.int32))
    return PageTable(packed, kv_lens, int(host[0, n]), int(counts.max(initial=0)))


def _width(num_rows: int) -> int:
    return -(-(num_rows + 1) // ALIGNMENT) * ALIGNMENT
