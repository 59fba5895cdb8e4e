"""`Model`: what the worker needs of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionLayer
from engine.attention.forward_batch import ForwardBatch
from engine.layers.adapted import AdaptedLinears
from engine.layers.expert_counts import ExpertCounts
from engine.layers.weights import WeightSource


class Model(Protocol):
    """One pipeline stage and tensor parallel shard of a decoder.

    A class of `engine.registry.MODELS` is called as `LlamaModel` is. The matrices that its ranks
    hold are those of `ModelConfig.layer_matrices`, from which memory is calculated before any
    weight is read.
    """

    dtype: torch.dtype
    attention_layers: tuple[AttentionLayer, ...]
    """Of this stage's layers, in order."""
    plans_attention: bool
    """Whether `forward` itself calls the backend's `init_forward`, for each part of the step."""

    def load(
        self, source: WeightSource, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Read this rank's weights; `progress(done, total)` after each layer. Raises `ConfigError`
        if the checkpoint doesn't fit."""

    def count_experts(self) -> dict[int, ExpertCounts]:
        """Count from now on how many tokens each expert gets: by decoder layer, {} without
        mixtures. Call this behind `load`."""

    def allocate(self, num_rows: int) -> None:
        """Make room for what the model keeps of requests beside keys and values; their rows are
        below `num_rows`. Call this once, behind `load`."""

    def adapt(self, linears: AdaptedLinears) -> None:
        """Let the linears of this stage's layers have adapters. Call this once, behind `load`."""

    def forward(
        self,
        batch: ForwardBatch,
        backend: AttentionBackend,
        hidden: Tensor | None,
        *,
        only_sampled: bool = False,
    ) -> Tensor:
        """Run the stage's layers: [T, hidden] before the final norm, from the previous stage's
        `hidden` (None on the first). `only_sampled`: [N, hidden] of the tokens
        `batch.logits_rows`."""

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The norm behind the last layer: [N, hidden] -> [N, hidden], new. Last stage only."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [N, hidden] -> [N, vocab_size], of the model's type or float32. Last
        stage only; collective over the tensor parallel group."""
