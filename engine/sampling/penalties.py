"""Which tokens came before, for the slots whose requests penalise them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import to_device
from engine.protocol.step import SlotParams
from engine.sampling.plan import PenaltyGroup


class PenaltyPool:
    """Token history of slots with penalties, one pool row each, 8 bytes per vocabulary entry.

    `counts` float32 [rows, vocab]: how often each token was output. `seen` float32 [rows, vocab]:
    1 if the token occurs in the prompt or the output, else 0. The pool doubles when all rows are
    taken; a row is freed when its slot is installed anew.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._row_of_slot: dict[int, int] = {}
        self._free: list[int] = []
        self.counts = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        self.seen = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)

    def row(self, slot: int) -> int:
        """Pool row of an installed slot."""
        return self._row_of_slot[slot]

    def free(self, slot: int) -> None:
        """Give back the slot's row, if it has one."""
        row = self._row_of_slot.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def check(self, item: SlotParams) -> None:
        """Raise `ValueError` unless the slot came with all its tokens, all in the vocabulary."""
        tokens = item.token_ids
        if tokens is None or len(tokens) < item.prompt_len:
            raise ValueError(f"slot {item.slot} uses penalties but came without its token ids")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise ValueError(f"slot {item.slot} came with token ids outside the vocabulary")

    def install(self, slots: Sequence[SlotParams]) -> None:
        """Take a row for each slot and fill it from the request's tokens so far.

        The slots have no row yet (`free`) and passed `check`.
        """
        tokens = [np.asarray(item.token_ids, dtype=np.int64) for item in slots]
        while len(self._free) < len(slots):
            self._grow()
        rows = np.array([self._free.pop() for _ in slots], dtype=np.int64)
        self._row_of_slot.update(
            {item.slot: int(row) for item, row in zip(slots, rows, strict=True)}
        )
        flat = [row * self._vocab_size + ids for row, ids in zip(rows, tokens, strict=True)]
        output = [ids[item.prompt_len :] for item, ids in zip(slots, flat, strict=True)]
        index = to_device(rows, self._device)
        self.counts.index_fill_(0, index, 0.0)
        self.seen.index_fill_(0, index, 0.0)
        self.seen.view(-1).index_fill_(0, to_device(np.concatenate(flat), self._device), 1.0)
        output_index = to_device(np.concatenate(output), self._device)
        ones = torch.ones(output_index.shape, dtype=torch.float32, device=self._device)
        self.counts.view(-1).scatter_add_(0, output_index, ones)

    def apply(
        self, logits: Tensor, group: PenaltyGroup, factors: Tensor, earlier: Tensor | None = None
    ) -> None:
        """Penalise the group's rows of `logits` [S, vocab] in place.

        `earlier` int64 [2, P] are (row, token) pairs: drafts that count as output of the row.
        `factors` float32 [S, 3]: repetition, presence, frequency. Repetition (CTRL, Keskar et al.
        2019) covers prompt and output and divides a positive logit, multiplies another; presence
        and frequency (OpenAI) cover the output and are subtracted.
        """
        scores = group.rows.take(logits)
        repetition, presence, frequency = (
            group.rows.take(factors[:, column : column + 1]) for column in range(3)
        )
        drafts = None if earlier is None else _drafts_of(group, earlier, len(logits))
        if group.repetition:
            seen = self.seen.index_select(0, group.pool_rows)
            if drafts is not None:
                seen.view(-1).scatter_reduce_(0, drafts.cells(seen), drafts.counts, "amax")
            # 1 where not seen. Exact where seen, because repetition - 1 is exact down to 0.5.
            factor = seen.mul_(repetition - 1.0).add_(1.0)
            # Both halves instead of torch.where: comparisons aren't vectorised on a CPU.
            scores = (scores.clamp(min=0.0) / factor).add_(factor.mul_(scores.clamp(max=0.0)))
        if group.presence or group.frequency:
            counts = self.counts.index_select(0, group.pool_rows)
            if drafts is not None:
                counts.view(-1).scatter_add_(0, drafts.cells(counts), drafts.counts)
            if group.frequency:
                scores = scores - counts * frequency
            if group.presence:
                scores = scores - counts.clamp_(max=1.0).mul_(presence)
        group.rows.put(logits, scores)

    def add_tokens(
        self, group: PenaltyGroup, token_ids: Tensor, kept: Tensor | None = None
    ) -> None:
        """Count one new output token int64 [S] for each row of the group, if it is `kept` bool [S].
        None: all are."""
        index = group.pool_rows * self._vocab_size + group.rows.take(token_ids)
        if kept is not None:
            counts = group.rows.take(kept).to(torch.float32)
            self.seen.view(-1).scatter_reduce_(0, index, counts, "amax")
            self.counts.view(-1).scatter_add_(0, index, counts)
            return
        self.seen.view(-1).index_fill_(0, index, 1.0)
        ones = torch.ones(index.shape, dtype=torch.float32, device=self._device)
        self.counts.view(-1).scatter_add_(0, index, ones)

    def _grow(self) -> None:
        old = self.counts.shape[0]
        new = max(4, 2 * old)
        empty = torch.zeros((new - old, self._vocab_size), device=self._device)
        self.counts = torch.cat([self.counts, empty])
        self.seen = torch.cat([self.seen, empty])
        self._free.extend(range(new - 1, old - 1, -1))


class _Drafts(NamedTuple):
    """Drafts before the rows of a group."""

    rows: Tensor
    """int64 [P]: the group's rows."""
    tokens: Tensor
    counts: Tensor
    """float32 [P]: 1, or 0 for drafts of other rows, whose `rows` is 0."""

    def cells(self, table: Tensor) -> Tensor:
        """int64 [P]: index into the flat `table` [group, vocab]."""
        return self.rows * table.shape[1] + self.tokens


def _drafts_of(group: PenaltyGroup, earlier: Tensor, num_rows: int) -> _Drafts:
    rows, tokens = earlier[0], earlier[1]
    if group.rows.index is not None:
        place = torch.full((num_rows,), -1, dtype=torch.int64, device=rows.device)
        place[group.rows.index] = torch.arange(group.rows.count, device=rows.device)
        rows = place[rows]
    return _Drafts(rows.clamp(min=0), tokens, (rows >= 0).to(torch.float32))
