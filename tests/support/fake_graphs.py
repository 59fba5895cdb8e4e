"""CUDA graphs without CUDA: operators are recorded and run again on the same memory.

As in a real graph, a replay runs no Python of the model: all that the host decided, allocated or
read while recording stays as it was. Reading a value on the host while recording is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.base import AttentionInputs, AttentionLayer
from engine.attention.forward_batch import ForwardBatch
from engine.attention.torch_backend import TorchAttentionBackend
from engine.registry import ATTENTION_BACKENDS, SAMPLING_BACKENDS
from engine.sampling import torch_backend
from engine.sampling.base import Drawn
from engine.sampling.features.draw import Draw, DrawPlan
from engine.sampling.line_group import LineGroup
from engine.sampling.token_order import TokenOrder
from engine.sampling.torch_backend import TorchSampling
from engine.worker.graphs.backend import GraphBackend

_READS_VALUES = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::nonzero",
}


class _Call(NamedTuple):
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor, ...]
    """The results that have memory of their own."""


class Recorder(TorchDispatchMode):
    """Runs operators and records them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _READS_VALUES:
            raise RuntimeError(f"{name} reads the device while a graph is being captured")
        result = func(*args, **kwargs)
        known = {_memory(t) for t in _tensors((args, kwargs))}
        fresh = tuple(t for t in _tensors(result) if _memory(t) not in known)
        self.calls.append(_Call(func, args, kwargs, fresh))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, fresh in self.calls:
            result = func(*args, **kwargs)
            if not fresh:
                continue  # worked in place, or made a view
            known = {_memory(t) for t in _tensors((args, kwargs))}
            again = [t for t in _tensors(result) if _memory(t) not in known]
            for old, new in zip(fresh, again, strict=True):
                old.copy_(new)


class RecordedGraphs(GraphBackend):
    """Graphs by `Recorder`. `free` holds the answers of `free_bytes`; the last one repeats."""

    def __init__(self, free: list[int] | None = None) -> None:
        self.free = free or [1 << 40]
        self.captured = 0
        self.replayed = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.captured += 1
        with Recorder() as recorder:
            run()

        def replay() -> None:
            self.replayed += 1
            recorder.replay()

        return replay

    def free_bytes(self) -> int:
        return self.free.pop(0) if len(self.free) > 1 else self.free[0]


class CapturableAttention(TorchAttentionBackend):
    """Decodes over all cells of the table with a mask: slow, but independent of the host."""

    supports_graphs = True

    def __init__(self, inputs: AttentionInputs) -> None:
        super().__init__(inputs)
        self.graph_sizes: list[int] = []
        self.planned: list[int] = []
        """Sizes that `plan_graph` was called for."""

    def init_graphs(self, batch_sizes: Any) -> None:
        self.graph_sizes = list(batch_sizes)

    def plan_graph(self, batch: ForwardBatch) -> None:
        assert batch.num_long == 0 and batch.batch_size in self.graph_sizes
        self.planned.append(batch.batch_size)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> Tensor:
        if batch.num_long:
            return super().forward(q, k, v, layer, batch)
        self.pool.set_kv(layer.layer_id, self.inputs.places(layer, batch), k, v)
        slots = self.inputs.table(layer).index_select(0, batch.req_pool_indices)
        positions = torch.arange(slots.shape[1], device=slots.device)
        seen = positions < batch.seq_lens.unsqueeze(1)
        if layer.call.window is not None:
            seen = seen & (positions >= batch.seq_lens.unsqueeze(1) - layer.call.window)
        kv = self.pool.get(layer.layer_id)
        flat = slots.flatten()
        n, heads, dim = q.shape[0], layer.call.num_kv_heads, q.shape[2]
        keys = kv.k.index_select(0, flat).view(n, -1, heads, dim).transpose(1, 2)
        values = kv.v.index_select(0, flat).view(n, -1, heads, dim).transpose(1, 2)
        scores = torch.matmul(q.view(n, heads, -1, dim), keys.transpose(2, 3))
        scores = torch.where(seen[:, None, None, :], scores * layer.call.scale, -torch.inf)
        # Values beyond a row's end may be another request's NaN.
        values = torch.where(seen[:, None, :, None], values, 0.0)
        return torch.matmul(scores.softmax(-1), values).reshape(n, -1)


def use_capturable_attention(patch: pytest.MonkeyPatch) -> None:
    """Make `attention_backend: torch` mean `CapturableAttention`; the sampler then avoids numpy."""
    patch.setitem(ATTENTION_BACKENDS._entries, "torch", CapturableAttention)
    patch.setattr(torch_backend, "argmax", lambda values: values.argmax(-1))
    patch.setattr(torch_backend, "argmin", lambda values: values.argmin(-1))


class FixedSampling(TorchSampling):
    """Draws every line in every way and takes the one that its row asks for: slow, but independent
    of the plan, as `TritonSampling` is."""

    ignores_plan = True

    def sample(self, logits: Tensor, plan: DrawPlan, rows: Tensor, positions: Tensor) -> Drawn:
        vocab = self.table.vocab_size
        greedy, max_logit = super().sample(
            logits, DrawPlan({Draw.GREEDY: LineGroup(None, len(rows))}), rows, positions
        )
        params = self.table.params(rows)
        keys = self._noise.row_keys(self.table.mixed_seeds(rows), positions)
        lines = torch_backend.Lines(logits, params, keys)
        largest = max_logit.unsqueeze(1)
        # top_k is less than the vocabulary's size where it is used.
        of_some, of_all = (
            self._draw_ordered(lines, largest, count, True) for count in (vocab - 1, vocab)
        )
        drawn = torch.where(params.top_k.squeeze(1) < vocab, of_some, of_all)
        return Drawn(torch.where(params.top_k.squeeze(1) > 1, drawn, greedy), max_logit)


def use_fixed_sampling(patch: pytest.MonkeyPatch) -> None:
    """Make `sampling_backend: triton` mean `FixedSampling`; the order of tokens then avoids
    numpy."""

    def smallest(self: TokenOrder, keys: Tensor, count: int) -> Tensor:
        return keys.sort(dim=-1).values[:, :count]

    patch.setitem(SAMPLING_BACKENDS._entries, "triton", FixedSampling)
    patch.setattr(TokenOrder, "_smallest", smallest)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        return [t for value in values.values() for t in _tensors(value)]
    if isinstance(values, list | tuple):
        return [t for value in values for t in _tensors(value)]
    return []


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
