"""Order of tokens by likelihood, without ties: higher logit first, then lower token id."""

from __future__ import annotations

import torch
from torch import Tensor


def argmax(values: Tensor) -> Tensor:
    """First index int64 [n] of each row's maximum (or first NaN) in `values` [n, m]."""
    if values.device.type == "cpu":
        # 20 times faster than torch's: 11 against 240 us for [32, 4096] on one core.
        return torch.from_numpy(values.numpy().argmax(-1))
    return values.argmax(-1)


def argmin(values: Tensor) -> Tensor:
    """First index int64 [n] of each row's minimum (or first NaN) in `values` [n, m]."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmin(-1))
    return values.argmin(-1)


class TokenOrder:
    """Finds the likeliest tokens of each row, in an order that no tie can change.

    A token's sort key is an int64. Its high half holds the float bits of (row maximum - logit),
    which order like that non-negative number; its low half holds the token id. Keys are distinct,
    so the order doesn't depend on how many tokens are asked for, on the batch or on the device.
    Logits of a bfloat16 model tie often. Logits whose differences round to the same number count as
    tied.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._keys = torch.empty((0, vocab_size), dtype=torch.int64, device=device)

    def best(self, logits: Tensor, row_max: Tensor, count: int) -> Tensor:
        """Ids int64 [n, count] of the `count` likeliest tokens, best first.

        `logits` float32 [n, vocab_size], `row_max` its maxima [n, 1].
        """
        keys = self._reserve(logits.shape[0])
        high = keys.view(torch.float32)[:, 1::2]
        # + 0.0 because -0.0 - 0.0 is -0.0, whose sign bit would put it before all others.
        torch.sub(row_max + 0.0, logits, out=high)
        return self._smallest(keys, count) & 0xFFFFFFFF

    def _reserve(self, rows: int) -> Tensor:
        """Keys whose low halves already hold the token ids (little-endian: the first half)."""
        if rows > self._keys.shape[0]:
            self._keys = torch.arange(
                self._vocab_size, dtype=torch.int64, device=self._device
            ).repeat(rows, 1)
        return self._keys[:rows]

    def _smallest(self, keys: Tensor, count: int) -> Tensor:
        whole = count >= keys.shape[1]
        if keys.device.type == "cpu":
            # numpy selects and sorts int64 with SIMD: 0.2 and 0.8 ms for [32, 4096], where
            # torch's topk(64) and sort take 0.7 and 12 ms.
            array = keys.numpy().copy()
            if not whole:
                array.partition(count - 1, axis=-1)
                array = array[:, :count]
            array.sort(axis=-1)
            return torch.from_numpy(array)
        if whole:
            return keys.sort(dim=-1).values
        return keys.topk(count, dim=-1, largest=False, sorted=True).values
