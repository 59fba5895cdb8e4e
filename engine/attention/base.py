"""What a model needs from an attention backend, and what a backend is built from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from engine.checkpoint.layout import AttentionCall

if TYPE_CHECKING:
    from engine.attention.forward_batch import ForwardBatch
    from engine.attention.kv_pool import MHATokenToKVPool


@dataclass(frozen=True)
class AttentionLayer:
    """One attention call of a stage's forward. `layer_id` counts within the stage."""

    layer_id: int
    call: AttentionCall
    """With this rank's heads."""
    sinks: Tensor | None = None
    """float32 [num_heads]: for each head the score of a key without a value."""


@dataclass(frozen=True)
class AttentionInputs:
    """What lives as long as the engine: the KV cache, and the table of each request's tokens in it.

    `req_to_token` is int32 [rows, positions] on the device.
    """

    pool: MHATokenToKVPool
    req_to_token: Tensor
    layers: tuple[AttentionLayer, ...]
    query_dtype: torch.dtype | None = None
    """Type of the queries; None: the pool's."""
    window_table: Tensor | None = None
    """The same as `req_to_token` for layers with windows, if their tokens have other places."""

    def table(self, layer: AttentionLayer) -> Tensor:
        """int32 [rows, positions]: the places of each request's tokens in a layer."""
        has_own = self.window_table is not None and self.pool.has_windows[layer.layer_id]
        return self.window_table if has_own else self.req_to_token  # type: ignore[return-value]

    def table_within(self, window: int | None) -> Tensor:
        """The same of all layers with this window, where none shares keys with others."""
        if window is None or self.window_table is None:
            return self.req_to_token
        return self.window_table

    def places(self, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        """int64 [T]: where a step's tokens go in a layer."""
        if self.window_table is None or not self.pool.has_windows[layer.layer_id]:
            return batch.out_cache_loc
        if batch.window_loc is None:
            batch.window_loc = self.pool.window_slots(batch.out_cache_loc)
        return batch.window_loc


class AttentionBackend(ABC):
    """Causal attention of a step's tokens over their requests' cached and new tokens."""

    inputs: AttentionInputs
    supports_graphs: ClassVar[bool] = False
    """Whether `init_graphs` and `plan_graph` work."""

    supports_sampled_queries: ClassVar[bool] = False
    """Whether `forward_sampled` works."""

    can_be_recorded: ClassVar[bool] = False
    """Whether calls of `forward` may be repeated for other steps of the same shape: they read the
    step from the arrays of the batch that `init_forward` got."""

    rotates: ClassVar[bool] = False
    """Whether `forward_rotating` works."""

    @abstractmethod
    def init_forward(self, batch: ForwardBatch) -> None:
        """Prepare what all layers share. Call once per step, after `req_to_token` is up to date."""

    def init_graphs(self, batch_sizes: Sequence[int]) -> None:
        """Allocate what captured decodes of these sizes will read. Call once, before any capture.

        Raises `NotImplementedError` unless `supports_graphs`.
        """
        raise NotImplementedError(f"{type(self).__name__} can't be captured in CUDA graphs")

    def plan_graph(self, batch: ForwardBatch) -> None:
        """Do the work of `init_forward` for a captured decode, before its capture and each replay.

        `batch` has decodes only and one of the sizes of `init_graphs`; its tensors are the
        graph's own. This writes only to memory that graphs of this size read, and never waits for
        the device. `forward` uses this plan until the next plan is made.
        """
        raise NotImplementedError(f"{type(self).__name__} can't be captured in CUDA graphs")

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> Tensor:
        """Write k, v to the pool at `batch.out_cache_loc`, then attend. If they are those of
        another layer, which comes before, the pool has them already.

        q [T, num_heads, k_dim], k [T, num_kv_heads, k_dim], v [T, num_kv_heads, v_dim] ->
        [T, num_heads * v_dim].
        """

    def forward_sampled(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> Tensor:
        """The same for the queries of the tokens `batch.logits_rows` alone, N of them.

        q [N, num_heads, k_dim] -> [N, num_heads * v_dim]. Raises `NotImplementedError` unless
        `supports_sampled_queries`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs the queries of all tokens")

    def forward_rotating(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: tuple[Tensor, Tensor],
        layer: AttentionLayer,
        batch: ForwardBatch,
    ) -> Tensor:
        """The same as `forward` for q and k that aren't rotated yet; q is overwritten.

        `angles` are those of a `StepRope`. Raises `NotImplementedError`
        unless `rotates`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs rotated queries and keys")
