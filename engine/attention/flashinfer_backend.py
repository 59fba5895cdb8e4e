"""Paged attention with FlashInfer's kernels (Ye et al. 2025), for CUDA.

Lines of several tokens go through the prefill wrapper, decodes through the decode wrapper, a mixed
step through both. Each is planned once per step for all layers that share a window and a scale,
from lengths that the host knows, so that planning step t+1 overlaps with computing step t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionInputs, AttentionLayer
from engine.attention.forward_batch import ForwardBatch
from engine.attention.page_table import PageTable, packed_size, page_table
from engine.attention.plan_ring import PlanRing
from engine.checkpoint.layout import AttentionCall, beyond_plain
from engine.device.flashinfer_loader import (
    check_fa3,
    check_wrapper,
    lack_of_kernels,
    load_flashinfer,
    pin_ranges,
)
from engine.device.flashinfer_modules import decodes_on_tensor_cores
from engine.device.triton_loader import require_triton
from engine.errors import ConfigError
from engine.protocol.step import Int64Array

FLOAT_WORKSPACE_BYTES = 128 << 20
"""Holds partial results of split sequences; FlashInfer advises this size. All wrappers share one
workspace, because their calls follow each other."""
INT_WORKSPACE_BYTES = 8 << 20
"""Size of one plan, on the device and pinned; the wrappers themselves take the same size."""
STEPS_IN_FLIGHT = 3
"""Steps whose plans may not have reached the device yet: two by the overlap and one to spare."""


def lack_of_attention(dtype: torch.dtype, calls: Sequence[AttentionCall]) -> str:
    """What the attention kernels lack for queries of this type in `calls`; "" if nothing."""
    beyond = beyond_plain(calls)
    if beyond:
        return f"FlashInfer's attention here has no kernels for {', '.join(beyond)}"
    return lack_of_kernels(dtype, calls[0].k_dim) if calls else ""


def max_captured_rows(call: AttentionCall, kv_dtype: torch.dtype) -> int | None:
    """Most decodes of one graph whose partial results the workspace has room for, with the heads of
    this rank; None: any number.

    As FlashInfer's `PrefillPlanImpl` counts them: it splits every row of a graph, in tiles of query
    rows times heads of a group, and allows for one more tile per row.
    """
    if not decodes_on_tensor_cores(call.num_heads, call.num_kv_heads, kv_dtype):
        return None
    group = call.num_heads // call.num_kv_heads
    tile = next((size for size in (16, 64) if group <= size), 128)
    partial_rows = FLOAT_WORKSPACE_BYTES // (4 * call.num_heads * (call.v_dim + 1))
    tiles = partial_rows * group // tile
    # The most for which ceil(rows * group / tile) + rows - 1 <= tiles.
    return (tiles + 1) * tile // (group + tile)


def check_attention(dtype: torch.dtype, calls: Sequence[AttentionCall]) -> None:
    """Raise `ConfigError` if the attention kernels lack something for `calls`."""
    if lack := lack_of_attention(dtype, calls):
        raise ConfigError(f"attention_backend flashinfer: {lack}; set attention_backend: torch.")


class _Variant(NamedTuple):
    """Layers that share a plan."""

    window: int | None
    scale: float

    @property
    def window_left(self) -> int:
        """Tokens before its own that a query sees; -1: all."""
        return -1 if self.window is None else self.window - 1


@dataclass
class _GraphPages:
    """The pages that captured decodes of one window read, at addresses that stay.

    All batch sizes share them: every replay is preceded, on its stream, by its plan.
    """

    packed: Tensor
    """int32 [`packed_size` of the largest batch]"""
    indices: Tensor
    """int32 [largest batch * pages that a row can read]"""


@dataclass
class _GraphPlans:
    """The plans of captured decodes of one variant, at an address that stays."""

    int_workspace: Tensor
    wrappers: dict[int, Any] = field(default_factory=dict)
    """Decode wrappers by batch size."""
    planned: set[int] = field(default_factory=set)
    """Batch sizes that have been planned in full once."""


def make_fa3_attention(inputs: AttentionInputs) -> FlashInferAttentionBackend:
    """The backend with FlashAttention 3's prefill kernels (Hopper only)."""
    return FlashInferAttentionBackend(inputs, prefill_backend="fa3")


class FlashInferAttentionBackend(AttentionBackend):
    """Attention over `MHATokenToKVPool` with FlashInfer's paged wrappers.

    The pool is read as [pages, page_size, num_kv_heads, head_dim] (layout NHD). With a float8 pool
    keys and values are cast when written and scales are 1: checkpoints with own scales are
    quantized ones, which are refused.

    Why the wrappers' buffers are replaced: each plan is written to pinned memory and copied to the
    device behind the work that is queued there. A wrapper has one pinned buffer, which the next
    plan would overwrite before the copy (SGLang and mini-sglang wait there); `PlanRing` has
    several. The device's buffers need no such care: writers and readers follow each other on one
    stream.
    """

    supports_graphs = True
    rotates = True

    def __init__(self, inputs: AttentionInputs, prefill_backend: str = "fa2") -> None:
        """`prefill_backend`: "fa2", or "fa3" (Hopper only, not for float8 pools).

        Raises `ConfigError` if FlashInfer is missing or has no kernels for `inputs`.
        """
        self.inputs = inputs
        self.pool = inputs.pool
        self.device = inputs.req_to_token.device
        self.query_dtype = inputs.query_dtype or inputs.pool.dtype
        self._check(prefill_backend)
        self._flashinfer = load_flashinfer()
        if self.device.type == "cuda":
            pin_ranges(inputs.req_to_token.shape[0] + 1)
        require_triton()
        self._kernels: Any = import_module("engine.attention.triton_kernels")
        self.call = inputs.layers[0].call
        """Whose sizes all have."""
        page_size, heads, dim = self.pool.page_size, self.call.num_kv_heads, self.call.k_dim
        self._paged_kv = [
            tuple(kv.view(-1, page_size, heads, dim) for kv in self.pool.get(layer.layer_id))
            for layer in inputs.layers
        ]
        self.use_tensor_cores = decodes_on_tensor_cores(self.call.num_heads, heads, self.pool.dtype)
        self._float_workspace = torch.zeros(
            FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device
        )
        self._variants = {
            layer.layer_id: _Variant(layer.call.window, layer.call.scale) for layer in inputs.layers
        }
        distinct = list(dict.fromkeys(self._variants.values()))
        self._prefill = {variant: self._prefill_wrapper(prefill_backend) for variant in distinct}
        self.decode_wrappers = {variant: self._decode_wrapper() for variant in distinct}
        self.plan_ring = PlanRing(
            2 * len(distinct) * STEPS_IN_FLIGHT, INT_WORKSPACE_BYTES, self.device
        )
        self._graph_pages: dict[int | None, _GraphPages] = {}
        """By window."""
        self.graph_plans: dict[_Variant, _GraphPlans] = {}
        self._current = self.decode_wrappers
        """Decode wrappers that the last plan was made for."""

    def init_forward(self, batch: ForwardBatch) -> None:
        num_long = batch.num_long
        rows, seq_lens = batch.req_pool_indices_cpu, batch.seq_lens_cpu
        if num_long:
            long = slice(0, num_long)
            query_lens = batch.query_lens_cpu[long]
            for window, variants in self._windows():
                table = self._page_table(rows[long], query_lens, seq_lens[long], window)
                indices = self._page_indices(table, window)
                qo_indptr = self._pinned(batch.token_starts_cpu[: num_long + 1])
                for variant in variants:
                    self._plan_prefill(variant, table, indices, qo_indptr)
        if num_long < batch.batch_size:
            decode = slice(num_long, None)
            for window, variants in self._windows():
                table = self._page_table(rows[decode], None, seq_lens[decode], window)
                indices = self._page_indices(table, window)
                for variant in variants:
                    self._plan_decode(self.decode_wrappers[variant], variant, table, indices)
        self._current = self.decode_wrappers

    def init_graphs(self, batch_sizes: Sequence[int]) -> None:
        largest = max(batch_sizes)
        width = self.inputs.req_to_token.shape[1]
        for window, variants in self._windows():
            tokens = width if window is None else min(width, window)
            # A window's tokens may begin within a page.
            most = min(-(-tokens // self.pool.page_size) + 1, -(-width // self.pool.page_size))
            pages = _GraphPages(self._ints(packed_size(largest)), self._ints(largest * most))
            self._graph_pages[window] = pages
            for variant in variants:
                plans = _GraphPlans(
                    torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
                )
                for size in sorted(set(batch_sizes)):
                    plans.wrappers[size] = self._graph_wrapper(pages, plans, size)
                self.graph_plans[variant] = plans

    def plan_graph(self, batch: ForwardBatch) -> None:
        size = batch.batch_size
        if batch.num_long or any(size not in plans.wrappers for plans in self.graph_plans.values()):
            raise ValueError(f"no graph was prepared for {size} decodes")
        rows, seq_lens = batch.req_pool_indices_cpu, batch.seq_lens_cpu
        for window, variants in self._windows():
            pages = self._graph_pages[window]
            table = self._page_table(rows, None, seq_lens, window)
            indices = self._page_indices(table, window, pages)
            for variant in variants:
                plans = self.graph_plans[variant]
                if size in plans.planned:
                    self._replan_graph(plans.wrappers[size], variant, table, indices)
                else:
                    self._plan_decode(plans.wrappers[size], variant, table, indices)
                    plans.planned.add(size)
        self._current = {v: plans.wrappers[size] for v, plans in self.graph_plans.items()}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> Tensor:
        self.pool.set_kv(layer.layer_id, self.inputs.places(layer, batch), k, v)
        return self._attend(q, layer, batch)

    def forward_rotating(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: tuple[Tensor, Tensor],
        layer: AttentionLayer,
        batch: ForwardBatch,
    ) -> Tensor:
        kv = self.pool.get(layer.layer_id)
        places = self.inputs.places(layer, batch)
        self._kernels.rotate_and_store(q, k, v, *angles, kv.k, kv.v, places)
        return self._attend(q, layer, batch)

    def _attend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        """Attention of queries whose keys and values the pool has."""
        paged_kv = self._paged_kv[layer.layer_id]
        variant = self._variants[layer.layer_id]
        split, total = batch.num_long_tokens, q.shape[0]
        out = q.new_empty(q.shape)
        if split:
            self._prefill[variant].run(q[:split], paged_kv, out=out[:split])
        if split < total:
            self._current[variant].run(q[split:], paged_kv, out=out[split:])
        return out.view(total, -1)

    def _windows(self) -> list[tuple[int | None, list[_Variant]]]:
        """Variants by window: those of one window read the same pages."""
        found: dict[int | None, list[_Variant]] = {}
        for variant in self.decode_wrappers:
            found.setdefault(variant.window, []).append(variant)
        return list(found.items())

    def _page_table(
        self,
        rows: Int64Array,
        query_lens: Int64Array | None,
        seq_lens: Int64Array,
        window: int | None,
    ) -> PageTable:
        """Pages that rows with `query_lens` new tokens each can see. None: one new token each."""
        return page_table(
            rows,
            seq_lens * 0 + 1 if query_lens is None else query_lens,
            seq_lens,
            window,
            self.pool.page_size,
            pinned=self.device.type == "cuda",
        )

    def _page_indices(
        self, table: PageTable, window: int | None, pages: _GraphPages | None = None
    ) -> Tensor:
        """Page numbers int32 [num_pages] on the device, by one copy and one kernel, in layers with
        this window; in the memory of `pages` if captured decodes will read them."""
        if pages is None:
            pages = _GraphPages(
                *(
                    torch.empty(count, dtype=torch.int32, device=self.device)
                    for count in (table.packed.numel(), table.num_pages)
                )
            )
        indices = pages.indices[: table.num_pages]
        self._kernels.page_indices(
            table.upload(pages.packed),
            len(table.kv_lens),
            table.longest,
            self.inputs.table_within(window),
            self.pool.page_size,
            indices,
        )
        return indices

    def _plan_prefill(
        self, variant: _Variant, table: PageTable, indices: Tensor, qo_indptr: Tensor
    ) -> None:
        wrapper = self._prefill[variant]
        with self.plan_ring.take() as pinned:
            wrapper._pin_memory_int_workspace_buffer = pinned
            wrapper.plan(
                qo_indptr,
                table.indptr,
                indices,
                table.last_page_len,
                *self._sizes(),
                causal=True,
                o_data_type=self.query_dtype,
                seq_lens=table.kv_lens,
                **self._options(variant),
            )

    def _plan_decode(
        self, wrapper: Any, variant: _Variant, table: PageTable, indices: Tensor
    ) -> None:
        with self.plan_ring.take() as pinned:
            wrapper._pin_memory_int_workspace_buffer = pinned
            wrapper.plan(
                table.indptr,
                indices,
                table.last_page_len,
                *self._sizes(),
                o_data_type=self.query_dtype,
                seq_lens=table.kv_lens,
                **self._options(variant),
            )

    def _replan_graph(
        self, wrapper: Any, variant: _Variant, table: PageTable, indices: Tensor
    ) -> None:
        """Plan after `_plan_decode`, without its copies: the buffers are up to date.

        FlashInfer gets the host's lengths, so it reads nothing from the device. `o_data_type` and
        `seq_lens` aren't passed: the first plan's type stays, lengths follow from the page table.
        """
        with self.plan_ring.take() as pinned:
            wrapper._pin_memory_int_workspace_buffer = pinned
            self._flashinfer.fast_decode_plan(
                wrapper,
                table.indptr,
                indices,
                table.last_page_len,
                *self._sizes(),
                global_override_indptr_cpu=table.indptr,
                **self._options(variant),
            )

    def _sizes(self) -> tuple[int, int, int, int]:
        """Arguments that every plan takes after the pages."""
        call = self.call
        return call.num_heads, call.num_kv_heads, call.k_dim, self.pool.page_size

    def _options(self, variant: _Variant) -> dict[str, Any]:
        """Arguments that every plan takes by name."""
        return {
            "window_left": variant.window_left,
            "q_data_type": self.query_dtype,
            "kv_data_type": self.pool.dtype,
            "sm_scale": variant.scale,
            "non_blocking": True,
        }

    def _prefill_wrapper(self, backend: str) -> Any:
        wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._float_workspace, kv_layout="NHD", backend=backend
        )
        check_wrapper(wrapper)
        return wrapper

    def _decode_wrapper(self) -> Any:
        """A wrapper for steps that run eagerly."""
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._float_workspace,
            kv_layout="NHD",
            use_tensor_cores=self.use_tensor_cores,
            backend="fa2",
        )
        check_wrapper(wrapper)
        return wrapper

    def _graph_wrapper(self, pages: _GraphPages, plans: _GraphPlans, size: int) -> Any:
        """That of captured decodes of `size` rows."""
        packed = pages.packed[: packed_size(size)].view(4, -1)
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._float_workspace,
            kv_layout="NHD",
            use_cuda_graph=True,
            use_tensor_cores=self.use_tensor_cores,
            paged_kv_indptr_buffer=packed[0, : size + 1],
            paged_kv_indices_buffer=pages.indices,
            paged_kv_last_page_len_buffer=packed[1, :size],
            backend="fa2",
        )
        check_wrapper(wrapper)
        wrapper._int_workspace_buffer = plans.int_workspace
        return wrapper

    def _ints(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def _pinned(self, values: Int64Array) -> Tensor:
        tensor = torch.empty(len(values), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        tensor.numpy()[:] = values
        return tensor

    def _check(self, prefill_backend: str) -> None:
        check_attention(self.query_dtype, [layer.call for layer in self.inputs.layers])
        if prefill_backend == "fa3" and self.pool.dtype != self.query_dtype:
            raise ConfigError(
                "attention_backend flashinfer-fa3 can't read a KV cache of another type than the "
                "model's; set kv_cache_dtype: auto or attention_backend: flashinfer."
            )
        if prefill_backend == "fa3" and self.device.type == "cuda":
            check_fa3(torch.cuda.get_device_capability(self.device))
