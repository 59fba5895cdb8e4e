"""`StatePool`: what layers keep of each request beside keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.checkpoint.layout import StateSpec
from engine.device.pinned import to_device
from engine.protocol.step import Int64Array


class StatePool:
    """One row per running request, with its row's number in `req_to_token`; row 0 is nobody's.

    A row holds the states behind the last token that was computed of its request. Steps run in
    order, so a row that another request takes over is begun anew by that one's first chunk.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`dtype`: the model's."""
        self.specs, self.device = tuple(specs), device
        self._states = [
            torch.zeros(
                (num_rows, *spec.shape),
                dtype=torch.float32 if spec.is_float32 else dtype,
                device=device,
            )
            for spec in specs
        ]

    @property
    def num_bytes(self) -> int:
        return sum(state.numel() * state.element_size() for state in self._states)

    def take(self, rows: Int64Array) -> list[Tensor]:
        """States [n, *shape] of `rows` [n], one tensor for each of `specs`. Consecutive rows lie in
        the pool; others are copied, and `put` writes them back."""
        run = _run(rows)
        if run is not None:
            return [state[run] for state in self._states]
        index = to_device(rows, self.device)
        return [state.index_select(0, index) for state in self._states]

    def put(self, rows: Int64Array, taken: Sequence[Tensor]) -> None:
        """Keep what became of the states that `take(rows)` gave."""
        run = _run(rows)
        if run is None:
            index = to_device(rows, self.device)
        for state, new in zip(self._states, taken, strict=True):
            if run is None:
                state.index_copy_(0, index, new.to(state.dtype))
            elif new.data_ptr() != state[run].data_ptr():
                state[run] = new


def _run(rows: Int64Array) -> slice | None:
    """The slice that `rows` [n] are, if each follows the one before."""
    first, count = int(rows[0]), len(rows)
    is_run = int(rows[-1]) == first + count - 1 and bool((rows[1:] == rows[:-1] + 1).all())
    return slice(first, first + count) if is_run else None
