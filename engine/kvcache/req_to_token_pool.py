"""The table that says where each running request's tokens lie."""

from __future__ import annotations

import numpy as np

from engine.errors import KVPoolError

PADDING_ROW = 0


class ReqToTokenPool:
    """Rows of KV slot numbers, one for each of up to `size` running requests.

    `req_to_token[row, i]` is the slot of the request's token i (below `max_context_len`), valid
    for i below the request's length; what lies beyond is stale. Row 0 is the padding row of
    captured CUDA graphs and is never handed out, so usable rows are 1..size.
    """

    def __init__(self, size: int, max_context_len: int) -> None:
        if size < 1 or max_context_len < 1:
            raise ValueError(
                f"size and max_context_len must be at least 1, got {size} and {max_context_len}"
            )
        self.size = size
        self.max_context_len = max_context_len
        self.req_to_token = np.zeros((size + 1, max_context_len), dtype=np.int32)
        self._free_rows = list(range(size, 0, -1))
        self._is_free = bytearray([0] + [1] * size)

    def available_size(self) -> int:
        """Number of free rows."""
        return len(self._free_rows)

    def alloc(self) -> int | None:
        """A row in 1..size, or None when all are taken. Its contents are stale."""
        if not self._free_rows:
            return None
        idx = self._free_rows.pop()
        self._is_free[idx] = 0
        return idx

    def free(self, idx: int) -> None:
        """Give a row back. Raises `KVPoolError` if it is free already or not in 1..size."""
        if not PADDING_ROW < idx <= self.size:
            raise KVPoolError(f"row {idx} isn't a request row (1..{self.size})")
        if self._is_free[idx]:
            raise KVPoolError(f"row {idx} is freed twice")
        self._is_free[idx] = 1
        self._free_rows.append(idx)
