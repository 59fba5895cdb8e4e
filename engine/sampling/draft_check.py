"""Which drafts of a step are what would have been sampled anyway."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.forward_batch import sample_counts, token_starts
from engine.device.pinned import to_device
from engine.protocol.messages import Int64Array, ModelWorkerBatch


class DraftCheck(NamedTuple):
    """The drafts among the S' sampled tokens of a step, on the device, in the order of its S rows.

    A row of 1 + k sampled tokens has k drafts. The token sampled behind draft j is valid if all
    drafts up to j are.
    """

    rows: Tensor
    """int64 [S']: the row of each sampled token."""
    starts: Tensor
    """int64 [S]: index of each row's first sampled token."""
    drafts: Tensor
    """int64 [S']: the draft at the place of each sampled token, -1 behind the last draft."""
    earlier: Tensor
    """int64 [2, P]: (sampled token, draft before it), all pairs within a row."""
    starts_cpu: Int64Array

    def num_kept(self, sampled: Tensor) -> Tensor:
        """int64 [S]: tokens of each row up to and with the first that isn't its draft."""
        index = torch.arange(len(sampled), device=sampled.device)
        differs = torch.where(sampled == self.drafts, len(sampled), index)
        first = torch.full_like(self.starts, len(sampled)).scatter_reduce_(
            0, self.rows, differs, "amin"
        )
        return first - self.starts + 1

    def is_kept(self, num_kept: Tensor) -> Tensor:
        """bool [S']"""
        index = torch.arange(len(self.rows), device=self.rows.device)
        return index - self.starts[self.rows] < num_kept[self.rows]

    def last_kept(self, num_kept: Tensor) -> Tensor:
        """int64 [S]: index of each row's last token that is kept."""
        return self.starts + num_kept - 1


def draft_check(batch: ModelWorkerBatch, device: torch.device) -> DraftCheck:
    """What to compare in a complete step that checks drafts."""
    num_rows = len(batch.sample_rows)
    counts = sample_counts(batch)[:num_rows]
    ends = np.cumsum(counts)
    starts = ends - counts
    rows = np.repeat(np.arange(num_rows), counts)
    # Index of each sampled token's input among the step's tokens; the next input is the draft.
    inputs = token_starts(batch)[1:][batch.sample_rows][rows] - (ends[rows] - np.arange(len(rows)))
    is_last = np.arange(len(rows)) == ends[rows] - 1
    ahead = np.minimum(inputs + 1, len(batch.input_ids) - 1)
    drafts = np.where(is_last, -1, batch.input_ids[ahead]).astype(np.int64)
    before = np.arange(len(rows)) - starts[rows]
    of = np.repeat(np.arange(len(rows)), before)
    which = np.arange(len(of)) - np.repeat(np.cumsum(before) - before, before)
    pairs = np.stack([of, drafts[starts[rows[of]] + which]])
    return DraftCheck(
        to_device(rows, device),
        to_device(starts, device),
        to_device(drafts, device),
        to_device(pairs, device),
        starts,
    )
