"""The backend of a model whose layers make no attention call: all that they keep are states."""

from __future__ import annotations

from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionInputs, AttentionLayer
from engine.attention.forward_batch import ForwardBatch


class NoAttention(AttentionBackend):
    """It is asked for nothing."""

    def __init__(self, inputs: AttentionInputs) -> None:
        """Raises `ValueError` if there are layers."""
        self.inputs = inputs
        if inputs.layers:
            raise ValueError("a model with attention needs a backend that computes it")

    def init_forward(self, batch: ForwardBatch) -> None:
        pass

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> Tensor:
        raise ValueError("the model has no attention layers")
