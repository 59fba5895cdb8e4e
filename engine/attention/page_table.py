"""Which pages of the KV cache some rows read: compressed rows, as FlashInfer takes them.

Row i reads the pages `indices[indptr[i] : indptr[i + 1]]`, and of the last one
`last_page_len[i]` slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.protocol.step import Int64Array


class PageTable(NamedTuple):
    """The host's part. Tensors are int32 and, for CUDA, pinned, so that copies don't wait."""

    indptr: Tensor
    """[n + 1]"""
    last_page_len: Tensor
    """[n], 1 to page_size"""
    kv_lens: Tensor
    """[n]: tokens in the row's pages."""
    first_cells: Int64Array
    """[n]: cell of the flat `req_to_token` that holds the row's first page's first slot."""
    num_pages: int


def page_table(
    rows: Int64Array,
    query_lens: Int64Array,
    seq_lens: Int64Array,
    window: int | None,
    page_size: int,
    width: int,
    *,
    pinned: bool,
) -> PageTable:
    """Pages that the last `query_lens` of `seq_lens` tokens [n] of request `rows` can see.

    Pages wholly before the first query's `window` are left out. `width`: columns of
    `req_to_token`.
    """
    first_page = np.zeros(len(rows), dtype=np.int64)
    if window is not None:
        first_page = np.maximum(seq_lens - query_lens + 1 - window, 0) // page_size
    counts = -(-seq_lens // page_size) - first_page
    n = len(rows)
    packed = torch.empty(3 * n + 1, dtype=torch.int32, pin_memory=pinned)
    host = packed.numpy()
    host[0] = 0
    np.cumsum(counts, out=host[1 : n + 1])
    host[n + 1 : 2 * n + 1] = (seq_lens - 1) % page_size + 1
    host[2 * n + 1 :] = seq_lens - first_page * page_size
    return PageTable(
        indptr=packed[: n + 1],
        last_page_len=packed[n + 1 : 2 * n + 1],
        kv_lens=packed[2 * n + 1 :],
        first_cells=rows * width + first_page * page_size,
        num_pages=int(host[n]),
    )


def page_indices(
    table: PageTable, req_to_token: Tensor, page_size: int, out: Tensor | None = None
) -> Tensor:
    """Page numbers int32 [num_pages] on the device of `req_to_token` int32 [rows, width].

    They are written to the front of `out` if it is given. The device computes them from two numbers
    per row, without waiting; to copy the whole list would mean megabytes.
    """
    device = req_to_token.device
    n = len(table.first_cells)
    staged = torch.empty((2, n), dtype=torch.int64, pin_memory=device.type == "cuda")
    host = staged.numpy()
    indptr = table.indptr.numpy()
    host[0] = np.diff(indptr)
    host[1] = table.first_cells - indptr[:-1].astype(np.int64) * page_size
    counts, starts = staged.to(device, non_blocking=True)
    cells = starts.repeat_interleave(counts, output_size=table.num_pages)
    cells += torch.arange(0, table.num_pages * page_size, page_size, device=device)
    if out is None:
        pages = req_to_token.view(-1).index_select(0, cells)
    else:
        pages = out[: table.num_pages]
        torch.index_select(req_to_token.view(-1), 0, cells, out=pages)
    if page_size > 1:
        pages.div_(page_size, rounding_mode="floor")
    return pages
