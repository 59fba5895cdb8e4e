"""Runs one worker's part of the model: its pipeline stage, its tensor parallel shard."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionInputs
from engine.attention.registry import create_attention_backend
from engine.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.linear import local_kv_heads, shard
from engine.messages import ModelWorkerBatch
from engine.model_config import ModelConfig
from engine.models.loader import load_model, resolve_dtype
from engine.worker.forward_batch import ForwardBatch
from engine.worker.kv_pool import MHATokenToKVPool, resolve_kv_dtype


class ForwardOutput(NamedTuple):
    """Result of the last stage's forward.

    `logits` float32 [S, vocab_size] of the sampled rows; `hidden` [T, hidden] before the final
    norm, only if the batch asks for prompt logits.
    """

    logits: Tensor
    hidden: Tensor | None


class ModelRunner:
    """The model with its KV cache and attention backend.

    `num_kv_slots` in tokens, without the padding page. `req_to_token`, int32
    [max_running_requests + 1, max_model_len + page_size], mirrors the scheduler's table; the last
    row is for rows that only fill up a batch. Raises `ConfigError` if the model, the split or the
    sizes don't fit.
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
    ) -> None:
        if max_model_len > model_config.max_position_embeddings:
            raise ConfigError(
                f"max_model_len ({max_model_len}) exceeds the model's max_position_embeddings "
                f"({model_config.max_position_embeddings})."
            )
        self.model_config = model_config
        self.parallel = parallel
        self.device = torch.device(device)
        self.dtype = resolve_dtype(dtype, model_config)
        num_heads = shard("num_attention_heads", model_config.num_heads, parallel.tp_size)
        num_kv_heads = local_kv_heads(model_config.num_kv_heads, parallel.tp_size)
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
        self.kv_pool = MHATokenToKVPool(
            num_kv_slots,
            page_size,
            len(self.model.layers),
            num_kv_heads,
            model_config.head_dim,
            resolve_kv_dtype(kv_cache_dtype, self.dtype),
            self.device,
        )
        self.req_to_token = torch.zeros(
            (max_running_requests + 1, max_model_len + page_size),
            dtype=torch.int32,
            device=self.device,
        )
        self.attention = create_attention_backend(
            attention_backend,
            AttentionInputs(
                self.kv_pool,
                self.req_to_token,
                self.model.attention_layers,
                num_heads,
                num_kv_heads,
                model_config.head_dim,
                self.dtype,
            ),
        )

    def prepare(self, batch: ModelWorkerBatch) -> ForwardBatch:
        """Device tensors of a step; brings `req_to_token` up to date with it.

        Batches must be prepared in the order in which the scheduler made them. -1 entries of the
        result's `input_ids` are the caller's to resolve before `forward`.
        """
        prepared = ForwardBatch.from_worker_batch(batch, self.device)
        self._update_req_to_token(batch, prepared)
        return prepared

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
        batch.started_at = time.monotonic()
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

    def _update_req_to_token(self, batch: ModelWorkerBatch, prepared: ForwardBatch) -> None:
        width = self.req_to_token.shape[1]
        table = self.req_to_token.view(-1)
        if len(batch.prefix_rows):
            lens = batch.prefix_lens.astype(np.int64)
            starts = np.cumsum(lens) - lens
            base = np.repeat(prepared.prefix_rows_cpu * width - starts, lens)
            index = torch.from_numpy(base + np.arange(len(base))).to(self.device)
            locs = torch.from_numpy(batch.prefix_locs.astype(np.int32)).to(self.device)
            table.index_copy_(0, index, locs)
        rows = prepared.req_pool_indices
        if prepared.num_extend:
            counts = torch.from_numpy(np.diff(prepared.token_starts_cpu)).to(self.device)
            rows = rows.repeat_interleave(counts, output_size=prepared.num_tokens)
        table.index_copy_(0, rows * width + prepared.positions, prepared.out_cache_loc.int())
