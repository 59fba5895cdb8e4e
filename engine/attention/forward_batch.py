"""One step as device tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.device.clock import StepTiming
from engine.device.pinned import to_device
from engine.protocol.messages import Int64Array, ModelWorkerBatch
from engine.protocol.step_layout import sample_counts, token_starts
from engine.protocol.step_parts import PooledRows

A = TypeVar("A")


class StepInputs(NamedTuple, Generic[A]):
    """What the device needs to know of a step: numpy arrays, or tensors made of them."""

    input_ids: A
    """int64 [T]; -1 entries must be resolved before the forward."""
    positions: A
    """int64 [T]: of each token in its request."""
    out_cache_loc: A
    """int64 [T]: the KV slot of each token."""
    req_pool_indices: A
    """int64 [B]: row of `req_to_token` of each request."""
    logits_rows: A
    """int64 [S + L]: index into the T tokens of each sampled row's last token, then of each of
    `PooledRows.last`. A row that checks drafts counts once for each of its tokens, in order."""
    sample_slots: A
    """int64 [S + L]: `req_pool_indices` of these rows."""
    sample_lens: A
    """int64 [S + L]: tokens of the row up to and with that token."""
    seq_lens: A
    """int32 [B]: tokens in the cache once the step is done."""


def step_inputs(
    batch: ModelWorkerBatch, starts: Int64Array | None = None
) -> StepInputs[np.ndarray]:
    """The inputs of one step, on the host. `starts`: its `token_starts`."""
    if starts is None:
        starts = token_starts(batch)
    rows = batch.req_pool_indices.astype(np.int64)
    seq_lens = batch.seq_lens.astype(np.int64)
    query_lens = np.diff(starts)
    tokens = np.arange(starts[-1])
    positions = tokens + np.repeat(seq_lens - starts[1:], query_lens)
    if batch.num_extend == 0 and len(batch.sample_rows) == len(rows):
        # Every token of every row is sampled.
        logits_rows, sample_slots, sample_lens = tokens, rows, positions + 1
        if batch.verify is not None:
            sample_slots = np.repeat(rows, query_lens)
    else:
        sampled = batch.sample_rows
        if batch.pooled is not None:
            sampled = np.concatenate([sampled, batch.pooled.last])
        behind: np.ndarray | int = 0
        if batch.verify is not None:
            counts = sample_counts(batch)
            sampled = np.repeat(sampled, counts)
            behind = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(sampled))
        logits_rows = starts[1:][sampled] - 1 - behind
        sample_slots, sample_lens = rows[sampled], seq_lens[sampled] - behind
    return StepInputs(
        input_ids=batch.input_ids.astype(np.int64),
        positions=positions,
        out_cache_loc=batch.out_cache_loc.astype(np.int64),
        req_pool_indices=rows,
        logits_rows=logits_rows,
        sample_slots=sample_slots,
        sample_lens=sample_lens,
        seq_lens=batch.seq_lens.astype(np.int32),
    )


@dataclass
class ForwardBatch:
    """Rows and tokens as in `ModelWorkerBatch`: T tokens, B rows, the first `num_extend` extend.
    Rows that check drafts count as extend rows here: they are a few tokens behind a prefix.

    Tensors are those of `StepInputs`. Fields ending in `_cpu` are host copies, so that planning
    never reads the device.
    """

    micro_batch: int
    num_extend: int
    num_extend_tokens: int
    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    req_pool_indices: Tensor
    logits_rows: Tensor
    sample_slots: Tensor
    sample_lens: Tensor
    seq_lens: Tensor
    req_pool_indices_cpu: Int64Array
    sample_slots_cpu: Int64Array
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
    """Extend rows (indices < num_extend) for whose chunks logits are needed; set this before the
    forward."""
    pooled: PooledRows | None = None
    """Rows that are pooled, if there are any."""
    timing: StepTiming | None = None
    """The step's time on the device; begins when the stage has its inputs."""
    mark: Callable[[], None] | None = None
    """Called behind each layer: shows that the device goes on with a long step."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_starts_cpu[-1])

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_cpu)

    @classmethod
    def on_device(
        cls,
        batch: ModelWorkerBatch,
        host: StepInputs[np.ndarray],
        device: StepInputs[Tensor],
        starts: Int64Array | None = None,
    ) -> ForwardBatch:
        """`host` holds the inputs of `batch`, `device` the same on the device; `starts`: its
        `token_starts`."""
        num_extend = batch.num_extend if batch.verify is None else len(batch.req_pool_indices)
        if starts is None:
            starts = token_starts(batch)
        seq_lens = batch.seq_lens.astype(np.int64)
        extend_lens = np.diff(starts[: num_extend + 1])
        return cls(
            **device._asdict(),
            micro_batch=batch.micro_batch,
            num_extend=num_extend,
            num_extend_tokens=int(starts[num_extend]),
            req_pool_indices_cpu=host.req_pool_indices,
            sample_slots_cpu=host.sample_slots,
            seq_lens_cpu=seq_lens,
            extend_lens_cpu=extend_lens,
            prefix_lens_cpu=seq_lens[:num_extend] - extend_lens,
            token_starts_cpu=starts,
            prefix_rows_cpu=batch.prefix_rows.astype(np.int64),
            pooled=batch.pooled,
        )

    @classmethod
    def from_worker_batch(cls, batch: ModelWorkerBatch, device: torch.device) -> ForwardBatch:
        """Lay out `batch` for `device`, array by array (a worker uses its `DeviceQueue`)."""
        inputs = step_inputs(batch)
        on_device = StepInputs(*(to_device(array, device) for array in inputs))
        return cls.on_device(batch, inputs, on_device)
