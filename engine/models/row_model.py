"""`RowModel`: a decoder of transformers whose layers keep states of requests.

The states are beside keys and values, or instead of them (Mamba, linear attention, short
convolutions). So a step isn't one call of the model's code but several (`RowSteps`).
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.forward_batch import ForwardBatch
from engine.models.row_cache import RowCache
from engine.models.row_check import (
    NUM_ROWS,
    ROUNDING,
    ROUNDING_16_BITS,
    continues_chunks,
    difference_of_parts,
)
from engine.models.row_steps import RowSteps
from engine.models.state_pool import StatePool
from engine.models.transformers_model import TransformersModel

logger = logging.getLogger(__name__)


class RowModel(TransformersModel):
    """A `Model` (engine/models/base.py) of one rank."""

    plans_attention = True
    _continues_chunks = True

    def allocate(self, num_rows: int) -> None:
        self.rows = self._row_steps(num_rows)
        if not self._continues_chunks:
            logger.warning(
                "the code of %s continues a request by one token at a time: of a prompt longer "
                "than chunked_prefill_size the rest takes long. Raise that, or set it to -1",
                type(self._model).__name__,
            )

    def forward(
        self,
        batch: ForwardBatch,
        backend: AttentionBackend,
        hidden: Tensor | None,
        *,
        only_sampled: bool = False,
    ) -> Tensor:
        step = self._step

        def begin(part: ForwardBatch) -> None:
            backend.init_forward(part)
            step.backend, step.batch = backend, part
            if self._linears is not None:
                self._linears.step.begin(part.adapters)
            if part.mark is not None:
                part.mark()

        states = self.rows.run(batch, begin)
        return states.index_select(0, batch.logits_rows) if only_sampled else states

    def _differences(self) -> tuple[float, float]:
        """The same of the output head; and by how much more than by rounding a request that comes
        in parts differs from one that comes whole. Finds out what parts may be."""
        _, head = super()._differences()
        with torch.inference_mode():
            self._continues_chunks = continues_chunks(self._row_steps(NUM_ROWS))
            apart = difference_of_parts(self._row_steps(NUM_ROWS), self.config.vocab_size)
        return 0.0 if apart <= ROUNDING.get(self.dtype, ROUNDING_16_BITS) else apart, head

    def _row_steps(self, num_rows: int) -> RowSteps:
        states = self._layout.states
        pool = StatePool(states, num_rows, self.dtype, self.device)
        cache = RowCache(self._model.config, states)
        return RowSteps(self._compute, cache, pool, self._continues_chunks)

    def _compute(self, ids: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        """Ids [n, L] of n requests whose states are in the cache -> [n, L, hidden]"""
        step, decoder = self._step, self._decoder
        step.begin()
        hidden: Tensor = decoder.module(**decoder.given(ids, positions, cache)).last_hidden_state
        if step.backend is not None and step.calls != len(step.layers):
            raise RuntimeError(f"{step.calls} of {len(step.layers)} attention calls were made")
        return hidden
