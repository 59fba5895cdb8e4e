"""Runs one worker's part of the model: its pipeline stage, its tensor parallel shard."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionInputs
from engine.attention.forward_batch import ForwardBatch, StepInputs, step_inputs
from engine.attention.kv_pool import MHATokenToKVPool, resolve_kv_dtype
from engine.attention.no_attention import NoAttention
from engine.checkpoint.adapter import PeftAdapter
from engine.config import WorkerConfig
from engine.device.distributed import ParallelState
from engine.device.queue import make_queue
from engine.device.triton_loader import lack_of_triton
from engine.errors import ConfigError
from engine.layers.adapted import AdaptedLinears, MakeAdapters, NativeAdapters, TorchAdapters
from engine.layers.slotted_adapters import SlottedAdapters
from engine.memory_need import CacheSize, WindowNeed
from engine.models.load_progress import LoadProgress
from engine.models.loader import load_model
from engine.protocol.step import Int64Array, IntArray, ModelWorkerBatch
from engine.registry import ATTENTION_BACKENDS
from engine.worker.pooler import Pooler
from engine.worker.sizing.kv_sizing import MemoryMeter


class ForwardOutput(NamedTuple):
    """Result of the last stage's forward.

    `logits` float32 [S, vocab_size] of the sampled rows; `hidden` [T, hidden] before the final
    norm, only if the batch asks for prompt logits; `embeddings` float32 [E, hidden] if rows are
    pooled.
    """

    logits: Tensor
    hidden: Tensor | None
    embeddings: Tensor | None = None


class TableUpdate(NamedTuple):
    """Changes of `req_to_token`, on the host."""

    cells: Int64Array
    """int64 [N]: cells of the flattened table, each at most once."""
    locs: IntArray
    """int32 [N]: the KV slots that they get."""


class ModelRunner:
    """The model with its KV cache and attention backend.

    `req_to_token`, int32 [max_running_requests + 1, max_model_len + page_size], mirrors the
    scheduler's table; row 0 is for rows that only fill up a batch. Where layers with windows have
    fewer places than the others, `window_table` says the same of them.
    """

    def __init__(
        self,
        config: WorkerConfig,
        parallel: ParallelState,
        meter: MemoryMeter | None = None,
        table: Tensor | None = None,
    ) -> None:
        """Load this rank's weights and allocate what steps need. `table`: the `req_to_token` of
        another model, whose KV slots this one shares.

        A `meter` is told when only the weights are there. Until `resize_kv_cache` the KV cache then
        has only its padding page; without a `meter` it has the size of `config`. Raises
        `ConfigError` if the checkpoint or the sizes don't fit.
        """
        config.model.check_split(parallel.tp_size, parallel.pp_size, parallel.ep_size)
        longest = config.model.max_position_embeddings
        if config.max_model_len > longest:
            raise ConfigError(
                f"max_model_len ({config.max_model_len}) exceeds the model's "
                f"max_position_embeddings ({longest})."
            )
        self.config = config
        self.parallel = parallel
        self.device = torch.device(config.device)
        self.queue = make_queue(self.device)
        progress = LoadProgress() if parallel.rank == 0 else None
        self.model = load_model(config, parallel, self.device, progress)
        self.dtype = self.model.dtype
        counts = config.engine.enable_expert_metrics
        self.expert_counts = self.model.count_experts() if counts else {}
        """By decoder layer."""
        self._pooler = Pooler(self.model.final_norm)
        self.adapted: AdaptedLinears | None = None
        """Set if requests may have adapters. Those of a draft model have none."""
        if config.engine.has_adapters and table is None:
            is_gpu, listed = self.device.type == "cuda", config.engine.lora_adapters
            self.adapted = AdaptedLinears(
                config.engine.max_loras,
                self._adapters_for(config),
                max_rank=config.engine.max_lora_rank if is_gpu else None,
                takes_experts=not is_gpu
                or any(PeftAdapter.open(Path(at)).changes_experts for at in listed.values()),
            )
            self.model.adapt(self.adapted)
        if meter is not None:
            meter.loaded()
        self.model.allocate(config.engine.max_running_requests + 1)
        shape = (
            config.engine.max_running_requests + 1,
            config.max_model_len + config.engine.page_size,
        )
        is_guest = table is not None
        if table is None:
            table = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.req_to_token = table
        self.windows = None if is_guest else WindowNeed.of(config.resolved)
        self._window_table = None if self.windows is None else torch.zeros_like(table)
        self._make_kv_cache((config.num_kv_tokens or 0) if meter is None else 0)

    def resize_kv_cache(self, num_kv_slots: int) -> None:
        """Replace the KV cache by an empty one of `num_kv_slots` tokens, and its attention backend.

        Call this before the first step.
        """
        # Delete the old ones before the new ones are made: there may be no room for both.
        del self.attention, self.kv_pool
        self._make_kv_cache(num_kv_slots)

    def _adapters_for(self, config: WorkerConfig) -> MakeAdapters:
        """What computes adapters of this rank's linears."""
        if self.device.type != "cuda":
            return NativeAdapters if config.kernels.layers == "cpu" else TorchAdapters
        return partial(
            SlottedAdapters,
            max_rank=config.engine.max_lora_rank,
            like=torch.empty(0, dtype=self.dtype, device=self.device),
            by_triton=config.kernels.layers != "torch" and not lack_of_triton(),
        )

    @property
    def cache_size(self) -> CacheSize:
        """What a KV cache takes on this rank."""
        calls = [layer.call for layer in self.model.attention_layers]
        return CacheSize.of([calls], self.kv_pool.dtype.itemsize, self.windows)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one slot takes on this rank, in all layers."""
        return self.cache_size.per_token

    def _make_kv_cache(self, num_slots: int) -> None:
        """Make a KV cache of `num_slots` tokens besides the padding page, and its backend."""
        config, layers = self.config, self.model.attention_layers
        near = None if self.windows is None else self.windows.slots(num_slots)
        self.window_table = None if near is None else self._window_table
        self.kv_pool = MHATokenToKVPool(
            num_slots,
            config.engine.page_size,
            [layer.call for layer in layers],
            resolve_kv_dtype(config.engine.kv_cache_dtype, self.dtype),
            self.device,
            near,
        )
        inputs = AttentionInputs(
            self.kv_pool, self.req_to_token, layers, self.dtype, self.window_table
        )
        make = ATTENTION_BACKENDS[config.kernels.attention] if layers else NoAttention
        self.attention: AttentionBackend = make(inputs)

    def prepare(self, batch: ModelWorkerBatch) -> ForwardBatch:
        """Device tensors of a step; brings `req_to_token` up to date with it.

        Batches must be prepared in the order in which the scheduler made them. -1 entries of the
        result's `input_ids` are the caller's to resolve before `forward`.
        """
        self.change_windows(batch)
        starts = batch.line_starts()
        inputs = step_inputs(batch, starts)
        update = self.table_update(batch, inputs)
        *tensors, cells, locs = self.queue.upload([*inputs, *update])
        self.write_table(cells, locs)
        forward = ForwardBatch.on_device(batch, inputs, StepInputs(*tensors), starts)
        if batch.adapters is not None and self.adapted is not None:
            slots = np.repeat(batch.adapters, batch.query_lens).astype(np.int32, copy=False)
            forward.adapters = self.adapted.rows(slots, self.device)
            if len(inputs.logits_rows) < len(slots):
                forward.sampled_adapters = forward.adapters.take(inputs.logits_rows)
        return forward

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
        """Run the stage. Returns None unless this is the last one.

        All stages but the first wait for the hidden states of the previous one. All but the last
        start sending their own and return.
        """
        received: Tensor | None = None
        if not self.parallel.is_first_stage:
            received = self.parallel.recv_hidden(
                batch.num_tokens, self.config.model.hidden_size, self.dtype, self.device
            )
        batch.timing = self.queue.begin()
        if not self.model.plans_attention:
            self.attention.init_forward(batch)
        only_sampled = (
            self.parallel.is_last_stage
            and self.attention.supports_sampled_queries
            and len(batch.logits_rows) < batch.num_tokens
            and not batch.prompt_logits_lines
            and (batch.pooled is None or len(batch.pooled.mean) == 0)
        )
        if self.adapted is not None:
            last = batch.sampled_adapters if only_sampled else None
            self.adapted.step.begin(batch.adapters, last)
        if batch.num_long:  # only such a step may take a device seconds
            batch.mark = self.queue.mark
        hidden = self.model.forward(batch, self.attention, received, only_sampled=only_sampled)
        if not self.parallel.is_last_stage:
            self.parallel.send_hidden(hidden)
            return None
        sampled = hidden if only_sampled else hidden.index_select(0, batch.logits_rows)
        embeddings: Tensor | None = None
        if batch.pooled is not None:
            num_sampled = len(sampled) - len(batch.pooled.last)
            embeddings = self._pooler(batch.pooled, batch, hidden, sampled[num_sampled:])
            sampled = sampled[:num_sampled]
        logits = self._logits(sampled)
        return ForwardOutput(logits, hidden if batch.prompt_logits_lines else None, embeddings)

    def _logits(self, sampled: Tensor) -> Tensor:
        if len(sampled) == 0:  # a middle chunk, or pooled rows alone
            vocab_size = self.config.model.vocab_size
            return sampled.new_empty((0, vocab_size), dtype=torch.float32)
        return self.model.compute_logits(sampled).float()

    @torch.inference_mode()
    def prompt_logits(self, batch: ForwardBatch, output: ForwardOutput, line: int) -> Tensor:
        """Float32 [query_len, vocab_size]: logits after each token of a line's chunk.

        `line` must be in `batch.prompt_logits_lines`. Collective over the tensor parallel group:
        every rank of it must call, in the same order.
        """
        if output.hidden is None or line not in batch.prompt_logits_lines:
            raise ValueError(f"prompt logits of line {line} weren't asked for before the forward")
        start, end = batch.token_starts_cpu[line : line + 2].tolist()
        return self.model.compute_logits(output.hidden[start:end]).float()

    def table_update(self, batch: ModelWorkerBatch, inputs: StepInputs[np.ndarray]) -> TableUpdate:
        """What a step changes in `req_to_token`: its new tokens, and replaced prefixes."""
        width = self.req_to_token.shape[1]
        token_rows = np.repeat(inputs.req_pool_indices, batch.query_lens)
        cells = token_rows * width + inputs.positions
        locs = batch.out_cache_loc.astype(np.int32)
        if len(batch.prefix_rows) == 0:
            return TableUpdate(cells, locs)
        prefixes = self._prefix_update(batch)
        return TableUpdate(
            np.concatenate([prefixes.cells, cells]), np.concatenate([prefixes.locs, locs])
        )

    def change_windows(self, batch: ModelWorkerBatch) -> None:
        """Note where layers with windows have their pages from this step on. Call this before the
        step's tables are written."""
        if batch.window_pages is not None and self.window_table is not None:
            pages, window_pages = batch.window_pages.astype(np.int64)
            self.kv_pool.change_windows(*self.queue.upload([pages, window_pages]))

    def write_prefixes(self, batch: ModelWorkerBatch) -> None:
        """Bring `req_to_token` up to date with the replaced prefixes of a step alone."""
        if len(batch.prefix_rows):
            cells, locs = self.queue.upload(self._prefix_update(batch))
            self.write_table(cells, locs)

    def _prefix_update(self, batch: ModelWorkerBatch) -> TableUpdate:
        lens = batch.prefix_lens.astype(np.int64)
        starts = np.cumsum(lens) - lens
        rows = batch.prefix_rows.astype(np.int64) * self.req_to_token.shape[1]
        cells = np.repeat(rows - starts, lens) + np.arange(lens.sum())
        return TableUpdate(cells, batch.prefix_locs.astype(np.int32))

    def write_table(self, cells: Tensor, locs: Tensor) -> None:
        """Apply a `TableUpdate` that is on the device."""
        self.req_to_token.view(-1).index_copy_(0, cells, locs)
        if self.window_table is not None:
            places = self.kv_pool.window_slots(locs)
            self.window_table.view(-1).index_copy_(0, cells, places)
