"""Which drafts of a step are what would have been sampled anyway."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import to_device
from engine.protocol.step import Int64Array, ModelWorkerBatch


@dataclass
class DraftCheck:
    """The drafts among the S' tokens behind which a step samples, in the order of its S lines.

    A line that samples 1 + k tokens has k drafts. The token sampled behind draft j is valid if all
    drafts up to j are. Fields are on the host, properties on the device.
    """

    device: torch.device
    counts: Int64Array
    """[S]: sampled tokens of each line."""
    starts_cpu: Int64Array
    """[S]: index of each line's first sampled token."""
    drafts_cpu: Int64Array
    """[S']: the draft at the place of each sampled token, -1 behind the last draft."""

    @cached_property
    def lines(self) -> Tensor:
        """int64 [S']: the line of each sampled token."""
        return to_device(self._lines_cpu, self.device)

    @cached_property
    def starts(self) -> Tensor:
        """int64 [S]: `starts_cpu`."""
        return to_device(self.starts_cpu, self.device)

    @cached_property
    def earlier(self) -> Tensor:
        """int64 [2, P]: (sampled token, draft before it), all pairs within a line."""
        lines, starts = self._lines_cpu, self.starts_cpu
        before = np.arange(len(lines)) - starts[lines]
        of = np.repeat(np.arange(len(lines)), before)
        which = np.arange(len(of)) - np.repeat(np.cumsum(before) - before, before)
        pairs = np.stack([of, self.drafts_cpu[starts[lines[of]] + which]])
        return to_device(pairs, self.device)

    @cached_property
    def _lines_cpu(self) -> Int64Array:
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def num_kept(self, sampled: Tensor) -> Tensor:
        """int64 [S]: tokens of each line up to and with the first that isn't its draft."""
        if sampled.device.type != "cpu":
            return self.num_kept_on_device(sampled)
        # Lists: a step has few tokens, and each call of numpy or torch costs as much as a line.
        tokens, drafts = sampled.tolist(), self.drafts_cpu.tolist()
        kept: list[int] = []
        for start in self.starts_cpu.tolist():
            at = start
            while tokens[at] == drafts[at]:  # never so for the last token of a line: -1
                at += 1
            kept.append(at - start + 1)
        return torch.tensor(kept, dtype=torch.int64)

    def num_kept_on_device(self, sampled: Tensor) -> Tensor:
        """`num_kept` without a look at the tokens by the host."""
        index = torch.arange(len(sampled), device=sampled.device)
        drafts = to_device(self.drafts_cpu, self.device)
        differs = torch.where(sampled == drafts, len(sampled), index)
        first = torch.full_like(self.starts, len(sampled)).scatter_reduce_(
            0, self.lines, differs, "amin"
        )
        return first - self.starts + 1

    def is_kept(self, num_kept: Tensor) -> Tensor:
        """bool [S']"""
        index = torch.arange(len(self.lines), device=self.lines.device)
        return index - self.starts[self.lines] < num_kept[self.lines]

    def last_kept(self, num_kept: Tensor) -> Tensor:
        """int64 [S]: index of each line's last token that is kept."""
        if self.device.type == "cpu":  # numpy takes half of torch's time for so few numbers
            return torch.from_numpy(self.starts_cpu + num_kept.numpy() - 1)
        return self.starts + num_kept - 1


def draft_check(batch: ModelWorkerBatch, device: torch.device) -> DraftCheck:
    """What to compare in a complete step that checks drafts."""
    counts = batch.run_lens
    ends = np.cumsum(counts)
    # The input behind a sampled token's own is the draft at its place.
    drafts = np.empty(ends[-1], np.int64)
    if ends[-1] == len(batch.input_ids):
        drafts[:-1] = batch.input_ids[1:]
    else:
        last = batch.line_starts()[1:][batch.sampled_lines] - 1
        behind = np.repeat(ends, counts) - 1 - np.arange(ends[-1])
        ahead = np.repeat(last, counts) - behind + 1
        drafts[:] = batch.input_ids[np.minimum(ahead, len(batch.input_ids) - 1)]
    drafts[ends - 1] = -1
    return DraftCheck(device, counts, ends - counts, drafts)
