"""Runs one worker's part of the model: its pipeline stage, its tensor parallel shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionInputs
from engine.attention.registry import create_attention_backend
from engine.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.linear import local_kv_heads, shard
from engine.model_config import ModelConfig
from engine.models.loader import load_model, resolve_dtype
from engine.protocol.messages import Int64Array, IntArray, ModelWorkerBatch
from engine.worker.device.queue import make_queue
from engine.worker.forward_batch import ForwardBatch, StepArrays, token_starts
from engine.worker.kv_pool import MHATokenToKVPool, resolve_kv_dtype


class ForwardOutput(NamedTuple):
    """Result of the last stage's forward.

    `logits` float32 [S, vocab_size] of the sampled rows; `hidden` [T, hidden] before the final
    norm, only if the batch asks for prompt logits.
    """

    logits: Tensor
    hidden: Tensor | None


class TableUpdate(NamedTuple):
    """Changes of `req_to_token`, on the host."""

    cells: Int64Array
    """int64 [N]: cells of the flattened table, each at most once."""
    locs: IntArray
    """int32 [N]: the KV slots that they get."""


class ModelRunner:
    """The model with its KV cache and attention backend.

    `num_kv_slots` in tokens, without the padding page; `resize_kv_cache` changes it before the
    first step. `req_to_token`, int32 [max_running_requests + 1, max_model_len + page_size],
    mirrors the scheduler's table; row 0 is for rows that only fill up a batch. Raises
    `ConfigError` if the model, the split or the sizes don't fit.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        dtype: str,
        device: str,
        page_size: int,
        num_kv_slots: int,
        max_running_requests: int,
        max_model_len: int,
        attention_backend: str,
        kv_cache_dtype: str = "auto",
        parallel: ParallelState,
        load_format: str = "auto",
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
        on_loaded: Callable[[], None] | None = None,
    ) -> None:
        """`progress(done, total)` after each layer's weights, `on_loaded()` after all of them,
        before anything else is allocated."""
        if max_model_len > model_config.max_position_embeddings:
            raise ConfigError(
                f"max_model_len ({max_model_len}) exceeds the model's max_position_embeddings "
                f"({model_config.max_position_embeddings})."
            )
        self.model_config = model_config
        self.parallel = parallel
        self.device = torch.device(device)
        self.queue = make_queue(self.device)
        self.dtype = resolve_dtype(dtype, model_config)
        self.page_size = page_size
        self.attention_backend = attention_backend
        self.kv_dtype = resolve_kv_dtype(kv_cache_dtype, self.dtype)
        self.num_heads = shard("num_attention_heads", model_config.num_heads, parallel.tp_size)
        self.num_kv_heads = local_kv_heads(model_config.num_kv_heads, parallel.tp_size)
        self.model = load_model(
            model_config,
            dtype=self.dtype,
            device=self.device,
            parallel=parallel,
            max_positions=max_model_len,
            load_format=load_format,
            seed=seed,
            progress=progress,
        )
        if on_loaded is not None:
            on_loaded()
        self.req_to_token = torch.zeros(
            (max_running_requests + 1, max_model_len + page_size),
            dtype=torch.int32,
            device=self.device,
        )
        self.kv_pool = self._make_kv_pool(num_kv_slots)
        self.attention = self._make_attention()

    def resize_kv_cache(self, num_kv_slots: int) -> None:
        """Replace the KV cache by an empty one of another size, and the backend that reads it."""
        # The old ones go before the new ones come: there may be no room for both.
        del self.attention, self.kv_pool
        self.kv_pool = self._make_kv_pool(num_kv_slots)
        self.attention = self._make_attention()

    @property
    def kv_bytes_per_token(self) -> int:
        """What one slot takes on this rank."""
        return self.kv_pool.num_bytes // (self.kv_pool.num_slots + self.page_size)

    def _make_kv_pool(self, num_slots: int) -> MHATokenToKVPool:
        return MHATokenToKVPool(
            num_slots,
            self.page_size,
            len(self.model.layers),
            self.num_kv_heads,
            self.model_config.head_dim,
            self.kv_dtype,
            self.device,
        )

    def _make_attention(self) -> AttentionBackend:
        return create_attention_backend(
            self.attention_backend,
            AttentionInputs(
                self.kv_pool,
                self.req_to_token,
                self.model.attention_layers,
                self.num_heads,
                self.num_kv_heads,
                self.model_config.head_dim,
                self.dtype,
            ),
        )

    def prepare(self, batch: ModelWorkerBatch) -> ForwardBatch:
        """Device tensors of a step; brings `req_to_token` up to date with it.

        Batches must be prepared in the order in which the scheduler made them. -1 entries of the
        result's `input_ids` are the caller's to resolve before `forward`.
        """
        arrays = StepArrays.of(batch)
        update = self.table_update(batch, arrays)
        *tensors, cells, locs = self.queue.upload([*arrays, *update])
        self.write_table(cells, locs)
        return ForwardBatch.from_arrays(batch, arrays, tensors)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
        """Run the stage. None unless this is the last one.

        A later stage first waits for the previous one's hidden states, an earlier one starts
        sending its own and returns.
        """
        received: Tensor | None = None
        if not self.parallel.is_first_stage:
            received = self.parallel.recv_hidden(
                batch.num_tokens, self.model_config.hidden_size, self.dtype, self.device
            )
        batch.timing = self.queue.begin()
        self.attention.init_forward(batch)
        hidden = self.model.forward(batch, self.attention, received)
        if not self.parallel.is_last_stage:
            self.parallel.send_hidden(hidden)
            return None
        logits = self.model.compute_logits(hidden.index_select(0, batch.logits_rows))
        return ForwardOutput(logits, hidden if batch.prompt_logits_rows else None)

    @torch.inference_mode()
    def prompt_logits(self, batch: ForwardBatch, output: ForwardOutput, row: int) -> Tensor:
        """Float32 [extend_len, vocab_size]: logits after each token of extend row `row`'s chunk.

        `row` must be in `batch.prompt_logits_rows`. Collective over the tensor parallel group:
        every rank of it must call, in the same order.
        """
        if output.hidden is None or row not in batch.prompt_logits_rows:
            raise ValueError(f"prompt logits of row {row} weren't asked for before the forward")
        start, end = batch.token_starts_cpu[row : row + 2].tolist()
        return self.model.compute_logits(output.hidden[start:end])

    def table_update(self, batch: ModelWorkerBatch, arrays: StepArrays) -> TableUpdate:
        """What a step changes in `req_to_token`: its new tokens, and replaced prefixes."""
        width = self.req_to_token.shape[1]
        token_rows = np.repeat(arrays.req_pool_indices, np.diff(token_starts(batch)))
        cells = token_rows * width + arrays.positions
        locs = batch.out_cache_loc.astype(np.int32)
        if len(batch.prefix_rows) == 0:
            return TableUpdate(cells, locs)
        lens = batch.prefix_lens.astype(np.int64)
        starts = np.cumsum(lens) - lens
        base = np.repeat(batch.prefix_rows.astype(np.int64) * width - starts, lens)
        prefix = base + np.arange(len(base))
        return TableUpdate(
            np.concatenate([prefix, cells]), np.concatenate([batch.prefix_locs, locs])
        )

    def write_table(self, cells: Tensor, locs: Tensor) -> None:
        """Carry out a `TableUpdate` that is on the device."""
        self.req_to_token.view(-1).index_copy_(0, cells, locs)
