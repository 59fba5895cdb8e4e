"""`Penalties` of tokens that came before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import to_device
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import Int64Array, RowParams
from engine.sampling.features.base import Adjustment, SampledLines
from engine.sampling.line_group import LineGroup, line_group


@dataclass(frozen=True)
class PenaltyGroup:
    """Lines with penalties; `pool_rows` int64 [count] are their rows in the pool."""

    lines: LineGroup
    pool_rows: Tensor
    repetition: bool
    presence: bool
    frequency: bool


class Penalties(Adjustment):
    """Penalties of repetition, presence and frequency, and the tokens that they are for.

    Rows that use them have a row each in a pool, 8 bytes per vocabulary entry. `counts` float32
    [pool rows, vocab]: how often each token was output. `seen` float32 [pool rows, vocab]: 1 if the
    token occurs in the prompt or the output, else 0. The pool doubles when all its rows are taken;
    one is free when its row is installed anew.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._pool_row: dict[int, int] = {}
        self._free: list[int] = []
        self.counts = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        self.seen = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        self._factors = torch.zeros((0, 3), dtype=torch.float32, device=device)
        """[pool rows, 3]: repetition, presence, frequency."""
        self._uses = np.zeros((0, 3), dtype=np.bool_)

    def check(self, item: RowParams) -> None:
        """Raise `ValueError` unless a row with penalties came with all its tokens, all in the
        vocabulary."""
        if not item.params.has_penalties:
            return
        tokens = item.token_ids
        if tokens is None or len(tokens) < item.prompt_len:
            raise ValueError(f"row {item.row} uses penalties but came without its token ids")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise ValueError(f"row {item.row} came with token ids outside the vocabulary")

    def install(self, items: Sequence[RowParams]) -> None:
        """What their requests' tokens are so far is in the items."""
        for item in items:
            pool_row = self._pool_row.pop(item.row, None)
            if pool_row is not None:
                self._free.append(pool_row)
        penalised = [item for item in items if item.params.has_penalties]
        if not penalised:
            return
        tokens = [np.asarray(item.token_ids, dtype=np.int64) for item in penalised]
        while len(self._free) < len(penalised):
            self._grow()
        pool_rows = np.array([self._free.pop() for _ in penalised], dtype=np.int64)
        taken = zip(penalised, pool_rows.tolist(), strict=True)
        self._pool_row.update({item.row: pool_row for item, pool_row in taken})
        factors = np.array([_factors(item.params) for item in penalised], dtype=np.float32)
        self._uses[pool_rows] = np.not_equal(factors, (1.0, 0.0, 0.0))
        flat = [row * self.vocab_size + ids for row, ids in zip(pool_rows, tokens, strict=True)]
        output = [ids[item.prompt_len :] for item, ids in zip(penalised, flat, strict=True)]
        index = to_device(pool_rows, self.device)
        self._factors.index_copy_(0, index, to_device(factors, self.device))
        self.counts.index_fill_(0, index, 0.0)
        self.seen.index_fill_(0, index, 0.0)
        self.seen.view(-1).index_fill_(0, to_device(np.concatenate(flat), self.device), 1.0)
        output_index = to_device(np.concatenate(output), self.device)
        ones = torch.ones(output_index.shape, dtype=torch.float32, device=self.device)
        self.counts.view(-1).scatter_add_(0, output_index, ones)

    def plan(self, rows: Int64Array) -> PenaltyGroup | None:
        if not self._pool_row:
            return None
        pool_rows = np.array([self._pool_row.get(row, -1) for row in rows.tolist()], np.int64)
        lines = line_group(pool_rows >= 0, self.device)
        if lines is None:
            return None
        pool_rows = pool_rows[pool_rows >= 0]
        repetition, presence, frequency = np.any(self._uses[pool_rows], axis=0).tolist()
        on_device = to_device(pool_rows, self.device)
        return PenaltyGroup(lines, on_device, repetition, presence, frequency)

    def apply(self, plan: PenaltyGroup, logits: Tensor, lines: SampledLines) -> None:
        """Repetition (CTRL, Keskar et al. 2019) covers prompt and output and divides a positive
        logit, multiplies another; presence and frequency (OpenAI) cover the output and are
        subtracted."""
        scores = plan.lines.take(logits)
        factors = self._factors.index_select(0, plan.pool_rows)
        repetition, presence, frequency = factors[:, 0:1], factors[:, 1:2], factors[:, 2:3]
        check = lines.check
        drafts = None if check is None else _drafts_of(plan, check.earlier, len(logits))
        if plan.repetition:
            seen = self.seen.index_select(0, plan.pool_rows)
            if drafts is not None:
                seen.view(-1).scatter_reduce_(0, drafts.cells(seen), drafts.counts, "amax")
            # 1 where not seen. Exact where seen, because repetition - 1 is exact down to 0.5.
            factor = seen.mul_(repetition - 1.0).add_(1.0)
            # Both halves instead of torch.where: comparisons aren't vectorised on a CPU.
            scores = (scores.clamp(min=0.0) / factor).add_(factor.mul_(scores.clamp(max=0.0)))
        if plan.presence or plan.frequency:
            counts = self.counts.index_select(0, plan.pool_rows)
            if drafts is not None:
                counts.view(-1).scatter_add_(0, drafts.cells(counts), drafts.counts)
            if plan.frequency:
                scores = scores - counts * frequency
            if plan.presence:
                scores = scores - counts.clamp_(max=1.0).mul_(presence)
        plan.lines.put(logits, scores)

    def drawn(self, plan: PenaltyGroup, token_ids: Tensor, kept: Tensor | None) -> None:
        """Count the tokens."""
        index = plan.pool_rows * self.vocab_size + plan.lines.take(token_ids)
        if kept is not None:
            counts = plan.lines.take(kept).to(torch.float32)
            self.seen.view(-1).scatter_reduce_(0, index, counts, "amax")
            self.counts.view(-1).scatter_add_(0, index, counts)
            return
        self.seen.view(-1).index_fill_(0, index, 1.0)
        ones = torch.ones(index.shape, dtype=torch.float32, device=self.device)
        self.counts.view(-1).scatter_add_(0, index, ones)

    def _grow(self) -> None:
        old = self.counts.shape[0]
        more = max(4, 2 * old) - old
        self.counts, self.seen, self._factors = (
            torch.cat([table, table.new_zeros((more, table.shape[1]))])
            for table in (self.counts, self.seen, self._factors)
        )
        self._uses = np.concatenate([self._uses, np.zeros((more, 3), dtype=np.bool_)])
        self._free.extend(range(old + more - 1, old - 1, -1))


def _factors(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


class _Drafts(NamedTuple):
    """Drafts before the lines of a group."""

    lines: Tensor
    """int64 [P]: the group's lines."""
    tokens: Tensor
    counts: Tensor
    """float32 [P]: 1, or 0 for drafts of other lines, whose `lines` is 0."""

    def cells(self, table: Tensor) -> Tensor:
        """int64 [P]: index into the flat `table` [group, vocab]."""
        return self.lines * table.shape[1] + self.tokens


def _drafts_of(group: PenaltyGroup, earlier: Tensor, num_lines: int) -> _Drafts:
    """`earlier`: `DraftCheck.earlier`."""
    lines, tokens = earlier[0], earlier[1]
    if group.lines.index is not None:
        place = torch.full((num_lines,), -1, dtype=torch.int64, device=lines.device)
        place[group.lines.index] = torch.arange(group.lines.count, device=lines.device)
        lines = place[lines]
    return _Drafts(lines.clamp(min=0), tokens, (lines >= 0).to(torch.float32))
