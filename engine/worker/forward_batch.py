"""One step as device tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.messages import ForwardMode, Int64Array, ModelWorkerBatch


@dataclass
class ForwardBatch:
    """Rows and tokens as in `ModelWorkerBatch`: T tokens, B rows, the first `num_extend` extend.

    Fields ending in `_cpu` are host copies, so that planning never reads the device.
    """

    step: int
    micro_batch: int
    forward_mode: ForwardMode
    num_extend: int
    num_extend_tokens: int
    input_ids: Tensor
    """int64 [T]; -1 entries must be resolved before the forward."""
    positions: Tensor
    """int64 [T]"""
    out_cache_loc: Tensor
    """int64 [T]"""
    req_pool_indices: Tensor
    """int64 [B]"""
    seq_lens: Tensor
    """int32 [B]: tokens in the cache once the step is done."""
    logits_rows: Tensor
    """int64 [S]: index into the T tokens of each sampled row's last token."""
    req_pool_indices_cpu: Int64Array
    seq_lens_cpu: Int64Array
    extend_lens_cpu: Int64Array
    """[num_extend]"""
    prefix_lens_cpu: Int64Array
    """[num_extend]: cached tokens before each chunk."""
    token_starts_cpu: Int64Array
    """[B + 1]: row i's tokens are [starts[i], starts[i+1])."""
    prefix_rows_cpu: Int64Array
    """Rows of `req_to_token` whose earlier content was replaced before this step."""
    prompt_logits_rows: list[int] = field(default_factory=list)
    """Extend rows (indices < num_extend) whose chunk's logits will be asked for; set before the
    forward."""
    started_at: float = 0.0
    """Monotonic seconds: when the stage had its inputs and began to compute."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_starts_cpu[-1])

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_cpu)

    @classmethod
    def from_worker_batch(cls, batch: ModelWorkerBatch, device: torch.device) -> ForwardBatch:
        """Lay out `batch` for `device`; copies don't wait for the device."""
        num_extend = batch.num_extend
        rows = batch.req_pool_indices.astype(np.int64)
        seq_lens = batch.seq_lens.astype(np.int64)
        query_lens = np.ones(len(rows), dtype=np.int64)
        query_lens[:num_extend] = batch.extend_lens
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=starts[1:])
        first = seq_lens - query_lens
        positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], query_lens)
        return cls(
            step=batch.step,
            micro_batch=batch.micro_batch,
            forward_mode=batch.forward_mode,
            num_extend=num_extend,
            num_extend_tokens=int(starts[num_extend]),
            input_ids=_to_device(batch.input_ids.astype(np.int64), device),
            positions=_to_device(positions, device),
            out_cache_loc=_to_device(batch.out_cache_loc.astype(np.int64), device),
            req_pool_indices=_to_device(rows, device),
            seq_lens=_to_device(batch.seq_lens.astype(np.int32), device),
            logits_rows=_to_device(starts[1:][batch.sample_rows] - 1, device),
            req_pool_indices_cpu=rows,
            seq_lens_cpu=seq_lens,
            extend_lens_cpu=query_lens[:num_extend],
            prefix_lens_cpu=first[:num_extend],
            token_starts_cpu=starts,
            prefix_rows_cpu=batch.prefix_rows.astype(np.int64),
        )


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
