"""`MinTokens`: no token may end an output that is too short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import to_device
from engine.protocol.step import Int64Array, RowParams
from engine.sampling.features.base import Adjustment, SampledLines


class _Banned(NamedTuple):
    """A row whose output has a least length."""

    token_ids: Int64Array
    """Those that would end it."""
    min_len: int
    """Tokens of prompt and output at which it may end."""


class BannedTokens(NamedTuple):
    """Entries `cells` int64 [N] of the flattened logits, forbidden while their `lines` int64 [N]
    have less than `min_lens` int64 [N] tokens."""

    cells: Tensor
    lines: Tensor
    min_lens: Tensor


class MinTokens(Adjustment):
    """`SamplingParams.min_tokens`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._banned: dict[int, _Banned] = {}

    def install(self, items: Sequence[RowParams]) -> None:
        for item in items:
            self._banned.pop(item.row, None)
            if item.params.min_tokens > 0:
                banned = sorted({*item.eos_token_ids, *item.params.stop_token_ids})
                if banned:
                    ids = np.array(banned, dtype=np.int64)
                    self._banned[item.row] = _Banned(ids, item.prompt_len + item.params.min_tokens)

    def plan(self, rows: Int64Array) -> BannedTokens | None:
        found = [
            (line, self._banned[row])
            for line, row in enumerate(rows.tolist())
            if row in self._banned
        ]
        if not found:
            return None
        counts = [len(banned.token_ids) for _, banned in found]
        lines = np.repeat([line for line, _ in found], counts)
        cells = lines * self.vocab_size + np.concatenate([banned.token_ids for _, banned in found])
        min_lens = np.repeat([banned.min_len for _, banned in found], counts)
        return BannedTokens(*(to_device(each, self.device) for each in (cells, lines, min_lens)))

    def apply(self, plan: BannedTokens, logits: Tensor, lines: SampledLines) -> None:
        too_short = lines.seq_lens.index_select(0, plan.lines) < plan.min_lens
        ban = torch.where(too_short, -torch.inf, 0.0).to(logits.dtype)
        logits.view(-1).scatter_add_(0, plan.cells, ban)
