"""One step as device tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.protocol.messages import ForwardMode, Int64Array, IntArray, ModelWorkerBatch
from engine.sampling.plan import to_device
from engine.worker.device.clock import StepTiming


class StepArrays(NamedTuple):
    """What the device needs to know of a step, on the host; sizes as in `ForwardBatch`."""

    input_ids: Int64Array
    positions: Int64Array
    out_cache_loc: Int64Array
    req_pool_indices: Int64Array
    logits_rows: Int64Array
    sample_slots: Int64Array
    sample_lens: Int64Array
    seq_lens: IntArray

    @classmethod
    def of(cls, batch: ModelWorkerBatch) -> StepArrays:
        """Of one step."""
        starts = token_starts(batch)
        rows = batch.req_pool_indices.astype(np.int64)
        seq_lens = batch.seq_lens.astype(np.int64)
        query_lens = np.diff(starts)
        sampled = batch.sample_rows
        return cls(
            input_ids=batch.input_ids.astype(np.int64),
            positions=np.arange(starts[-1]) + np.repeat(seq_lens - starts[1:], query_lens),
            out_cache_loc=batch.out_cache_loc.astype(np.int64),
            req_pool_indices=rows,
            logits_rows=starts[1:][sampled] - 1,
            sample_slots=rows[sampled],
            sample_lens=seq_lens[sampled],
            seq_lens=batch.seq_lens.astype(np.int32),
        )


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
    sample_slots: Tensor
    """int64 [S]: `req_pool_indices` of the sampled rows."""
    sample_lens: Tensor
    """int64 [S]: `seq_lens` of the sampled rows."""
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
    timing: StepTiming | None = None
    """Begun when the stage has its inputs."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_starts_cpu[-1])

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_cpu)

    @classmethod
    def from_arrays(
        cls, batch: ModelWorkerBatch, arrays: StepArrays, tensors: Sequence[Tensor]
    ) -> ForwardBatch:
        """`tensors`: what became of `arrays` on the device, in their order."""
        num_extend = batch.num_extend
        starts = token_starts(batch)
        seq_lens = batch.seq_lens.astype(np.int64)
        extend_lens = np.diff(starts[: num_extend + 1])
        (
            input_ids,
            positions,
            out_cache_loc,
            req_pool_indices,
            logits_rows,
            sample_slots,
            sample_lens,
            device_seq_lens,
        ) = tensors
        return cls(
            step=batch.step,
            micro_batch=batch.micro_batch,
            forward_mode=batch.forward_mode,
            num_extend=num_extend,
            num_extend_tokens=int(starts[num_extend]),
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=out_cache_loc,
            req_pool_indices=req_pool_indices,
            seq_lens=device_seq_lens,
            logits_rows=logits_rows,
            sample_slots=sample_slots,
            sample_lens=sample_lens,
            req_pool_indices_cpu=arrays.req_pool_indices,
            seq_lens_cpu=seq_lens,
            extend_lens_cpu=extend_lens,
            prefix_lens_cpu=seq_lens[:num_extend] - extend_lens,
            token_starts_cpu=starts,
            prefix_rows_cpu=batch.prefix_rows.astype(np.int64),
        )

    @classmethod
    def from_worker_batch(cls, batch: ModelWorkerBatch, device: torch.device) -> ForwardBatch:
        """Lay out `batch` for `device`, array by array (a worker uses its `DeviceQueue`)."""
        arrays = StepArrays.of(batch)
        return cls.from_arrays(batch, arrays, [to_device(array, device) for array in arrays])


def token_starts(batch: ModelWorkerBatch) -> Int64Array:
    """int64 [B + 1]: where each row's tokens start among the step's."""
    starts = np.ones(len(batch.req_pool_indices) + 1, dtype=np.int64)
    starts[0] = 0
    starts[1 : batch.num_extend + 1] = batch.extend_lens
    return np.cumsum(starts, out=starts)
