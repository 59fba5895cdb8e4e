"""One step as device tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.device.adapter_rows import AdapterRows
from engine.device.clock import StepTiming
from engine.device.pinned import to_device
from engine.protocol.step import Int64Array, ModelWorkerBatch, PooledLines

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
    """int64 [S' + L]: index into the T tokens of those behind which one is sampled, S' in all, then
    of the last token of each of `PooledLines.last`."""
    sample_rows: A
    """int64 [S' + L]: `req_pool_indices` of their lines."""
    sample_lens: A
    """int64 [S' + L]: tokens of the request up to and with them."""
    seq_lens: A
    """int32 [B]: tokens in the cache once the step is done."""


def step_inputs(
    batch: ModelWorkerBatch, starts: Int64Array | None = None
) -> StepInputs[np.ndarray]:
    """The inputs of a complete step, on the host. `starts`: its `line_starts()`."""
    if starts is None:
        starts = batch.line_starts()
    rows = batch.req_pool_indices.astype(np.int64)
    seq_lens = batch.seq_lens.astype(np.int64)
    tokens = np.arange(starts[-1])
    sampled = batch.num_sampled
    if len(tokens) == len(rows):  # one token each
        positions = seq_lens - 1
    else:
        positions = tokens + np.repeat(seq_lens - starts[1:], batch.query_lens)
    if batch.pooled is None and np.array_equal(sampled, batch.query_lens):
        lines = tokens if len(tokens) == len(rows) else np.repeat(np.arange(len(rows)), sampled)
        logits_rows = tokens
    else:
        lines = np.repeat(np.arange(len(rows)), sampled)
        logits_rows = batch.sampled_tokens(starts)
        if batch.pooled is not None:
            lines = np.concatenate([lines, batch.pooled.last])
            logits_rows = np.concatenate([logits_rows, starts[1:][batch.pooled.last] - 1])
    return StepInputs(
        input_ids=batch.input_ids.astype(np.int64),
        positions=positions,
        out_cache_loc=batch.out_cache_loc.astype(np.int64),
        req_pool_indices=rows,
        logits_rows=logits_rows,
        sample_rows=rows[lines],
        sample_lens=positions[logits_rows] + 1,
        seq_lens=batch.seq_lens.astype(np.int32),
    )


@dataclass
class ForwardBatch:
    """Lines and tokens as in `ModelWorkerBatch`: T tokens, B lines. The first `num_long` attend as
    chunks do, behind a prefix or without one, the others as decodes.

    Tensors are those of `StepInputs`. Fields ending in `_cpu` are host copies, so that planning
    never reads the device.
    """

    micro_batch: int
    num_long: int
    num_long_tokens: int
    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    req_pool_indices: Tensor
    logits_rows: Tensor
    sample_rows: Tensor
    sample_lens: Tensor
    seq_lens: Tensor
    req_pool_indices_cpu: Int64Array
    sample_rows_cpu: Int64Array
    seq_lens_cpu: Int64Array
    query_lens_cpu: Int64Array
    """[B]: tokens of each line."""
    prefix_lens_cpu: Int64Array
    """[B]: cached tokens before them."""
    token_starts_cpu: Int64Array
    """[B + 1]: line i's tokens are [starts[i], starts[i+1])."""
    prefix_rows_cpu: Int64Array
    """Rows of `req_to_token` whose earlier content was replaced before this step."""
    prompt_logits_lines: list[int] = field(default_factory=list)
    """Lines for whose chunks logits are needed; set this before the forward."""
    pooled: PooledLines | None = None
    """Lines that are pooled, if there are any."""
    window_loc: Tensor | None = None
    """`out_cache_loc` in layers with windows, where that is another one; found when it is needed
    first."""
    timing: StepTiming | None = None
    """The step's time on the device; begins when the stage has its inputs."""
    adapters: AdapterRows | None = None
    """Those of the T tokens; None: no token has one."""
    sampled_adapters: AdapterRows | None = None
    """Those of `logits_rows`, where these are not all tokens."""
    mark: Callable[[], None] | None = None
    """Called behind each layer: shows that the device goes on with a long step."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_starts_cpu[-1])

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_cpu)

    def part(self, lines: range, tokens: range) -> ForwardBatch:
        """`tokens` of these lines as a step that samples nothing: all of several lines, or some of
        a single one."""
        line, token = slice(lines.start, lines.stop), slice(tokens.start, tokens.stop)
        num_before = tokens.start - self.token_starts_cpu[lines.start]
        num_behind = self.token_starts_cpu[lines.stop] - tokens.stop
        ends = self.token_starts_cpu[lines.start : lines.stop + 1]
        starts = ends.clip(tokens.start, tokens.stop) - tokens.start
        num_long = min(max(self.num_long - lines.start, 0), len(lines))
        return replace(
            self,
            num_long=num_long,
            num_long_tokens=int(starts[num_long]),
            input_ids=self.input_ids[token],
            positions=self.positions[token],
            out_cache_loc=self.out_cache_loc[token],
            req_pool_indices=self.req_pool_indices[line],
            logits_rows=self.logits_rows[:0],
            sample_rows=self.sample_rows[:0],
            sample_lens=self.sample_lens[:0],
            seq_lens=self.seq_lens[line] - int(num_behind),
            req_pool_indices_cpu=self.req_pool_indices_cpu[line],
            sample_rows_cpu=self.sample_rows_cpu[:0],
            seq_lens_cpu=self.seq_lens_cpu[line] - num_behind,
            query_lens_cpu=np.diff(starts),
            prefix_lens_cpu=self.prefix_lens_cpu[line] + num_before,
            token_starts_cpu=starts,
            prompt_logits_lines=[],
            pooled=None,
            window_loc=None,
            adapters=None if self.adapters is None else self.adapters.part(token),
        )

    @classmethod
    def on_device(
        cls,
        batch: ModelWorkerBatch,
        host: StepInputs[np.ndarray],
        device: StepInputs[Tensor],
        starts: Int64Array | None = None,
    ) -> ForwardBatch:
        """`host` holds the inputs of `batch`, `device` the same on the device; `starts`: its
        `line_starts()`."""
        if starts is None:
            starts = batch.line_starts()
        num_long = batch.num_long
        seq_lens, query_lens = batch.seq_lens.astype(np.int64), batch.query_lens.astype(np.int64)
        return cls(
            **device._asdict(),
            micro_batch=batch.micro_batch,
            num_long=num_long,
            num_long_tokens=int(starts[num_long]),
            req_pool_indices_cpu=host.req_pool_indices,
            sample_rows_cpu=host.sample_rows,
            seq_lens_cpu=seq_lens,
            query_lens_cpu=query_lens,
            prefix_lens_cpu=seq_lens - query_lens,
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
