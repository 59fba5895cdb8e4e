"""What our kernels compute in place of a model's own modules: embeddings, norms, blocks,
attentions, layers, and a `Chain` of layers.

`engine.models.takeover` finds where each may take its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.layers.embedding_table import EmbeddingTable
from engine.layers.experts import Mixture
from engine.layers.fused_ops import FusedOps
from engine.layers.rotary import Angles

Forward = Callable[..., Any]


class Step(Protocol):
    """What parts ask of the step that is computed."""

    calls: int
    """Attention calls of this forward so far."""
    sampled: Tensor | None
    """int64 [N]: the only tokens whose results are read; None: all."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Tensor | None = None,
        angles: Angles | None = None,
    ) -> Tensor:
        """The next attention call: q and k [T, heads, k_dim], v [T, heads, v_dim] -> [T, width];
        of the tokens `rows` [N] alone [N, width]. q and k are rotated by `angles` first, in place
        if at all."""
        ...

    def angles(self, cos: Tensor, sin: Tensor) -> Angles:
        """Of the cosines and sines [1, T, dim] of a step's tokens."""
        ...


class Norm(nn.Module):
    """In place of a norm by the root mean square."""

    def __init__(self, weight: Tensor, eps: float, fused: FusedOps) -> None:
        super().__init__()
        self.weight, self.eps, self.fused = weight, eps, fused

    def forward(self, hidden_states: Tensor) -> Tensor:
        size = self.weight.shape[0]
        rows = hidden_states.reshape(-1, size)
        return self.fused.rms_norm(rows, self.weight, self.eps).view(hidden_states.shape)

    def of_heads(self, x: Tensor) -> Tensor:
        """[T, heads, size] -> [T, heads, size], new; x may have gaps."""
        return self.fused.rms_norm(x, self.weight, self.eps)


class TiedEmbedding(nn.Module):
    """In place of an embedding whose matrix our kernel multiplies by as output head, and which may
    scale the rows."""

    def __init__(self, own: nn.Embedding, table: EmbeddingTable, scale: Tensor | None) -> None:
        super().__init__()
        self.table, self.scale, self.padding_idx = table, scale, own.padding_idx
        self.num_embeddings, self.embedding_dim = own.num_embeddings, own.embedding_dim
        self.weight = torch.empty_like(own.weight, device="meta")
        """For code that looks at its type or shape."""

    def forward(self, input: Tensor) -> Tensor:
        rows = self.table(input.reshape(-1)).view(*input.shape, self.embedding_dim)
        return rows if self.scale is None else rows * self.scale

    @classmethod
    @torch.no_grad()
    def of(cls, own: nn.Embedding, table: EmbeddingTable) -> TiedEmbedding | None:
        """What computes the same, if it does."""
        sizes = own.weight.norm(dim=1)
        ids = sizes.topk(min(8, own.num_embeddings)).indices  # rows of 0 would show no scale
        if not sizes[ids[0]]:
            return None
        wanted, rows = own(ids), own.weight[ids]
        named = [*vars(own).values(), *own.buffers(recurse=False)]
        scales = [torch.as_tensor(x) for x in named if isinstance(x, float | Tensor)]
        single = [x.to(rows) for x in scales if x.numel() == 1 and x.is_floating_point()]
        if torch.equal(wanted, rows):
            return cls(own, table, None)
        return next((cls(own, table, x) for x in single if torch.equal(wanted, rows * x)), None)


class GatedBlock:
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, module: Any, product: Any, fused: FusedOps) -> None:
        self.down, self.product, self.fused = _of_rows(module.down_proj), product, fused

    def forward(self, hidden_states: Tensor) -> Tensor:
        out = self.of_rows(hidden_states)
        return out.view(*hidden_states.shape[:-1], out.shape[-1])

    def of_rows(self, x: Tensor) -> Tensor:
        """[..., hidden] of T tokens -> [T, hidden]"""
        return self.down(self.fused.silu_and_mul(self.product.whole(x)))


class Attention:
    """Projections, norms of each head or none, rotation or none, and the backend's call."""

    def __init__(
        self,
        module: Any,
        product: Any,
        heads: tuple[int, int],
        rotates: bool,
        step: Step,
        fused: FusedOps,
    ) -> None:
        self.product, self.out, self.rotates = product, _of_rows(module.o_proj), rotates
        self.step, self.fused = step, fused
        self.num_heads, self.num_kv_heads = heads
        self.q_norm, self.k_norm = (getattr(module, name, None) for name in ("q_norm", "k_norm"))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        angles = self.angles(position_embeddings)
        return self.compute(hidden_states, angles, None)[None], None

    def angles(self, position_embeddings: tuple[Tensor, Tensor] | None) -> Angles | None:
        """What `compute` takes, for a step's cosines and sines [1, T, dim]."""
        if not self.rotates:
            return None
        assert position_embeddings is not None
        return self.step.angles(*position_embeddings)

    def compute(self, x: Tensor, angles: Angles | None, rows: Tensor | None) -> Tensor:
        """[..., hidden] of T tokens -> [T, hidden], or [N, hidden] of the tokens `rows`."""
        joint = self.num_heads + self.num_kv_heads
        qkv = self.product.whole(x)
        qkv = qkv.view(len(qkv), joint + self.num_kv_heads, -1)
        q, k, v = qkv[:, : self.num_heads], qkv[:, self.num_heads : joint], qkv[:, joint:]
        if isinstance(self.q_norm, Norm) and isinstance(self.k_norm, Norm):
            q, k = self.q_norm.of_heads(q), self.k_norm.of_heads(k)
        return self.out(self.step.attend(q, k, v, rows, angles if self.rotates else None))


class Layer:
    """x + attention(norm(x)), and from that y + block(norm(y))."""

    def __init__(
        self, attention: Attention, norms: tuple[Norm, Norm], block: nn.Module, step: Step
    ) -> None:
        self.attention, self.norms, self.step = attention, norms, step
        ours = getattr(block.forward, "__self__", None)
        self.block = ours.of_rows if isinstance(ours, GatedBlock | Mixture) else _rows_of(block)
        self.is_last = False

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        angles = self.attention.angles(position_embeddings)
        rows = self.step.sampled if self.is_last else None
        out, x = self.compute(x, None, angles, rows)
        return out.add_(x)[None]

    def compute(
        self, x: Tensor, residual: Tensor | None, angles: Angles | None, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The output and the residual, each [T, hidden] or, of the tokens `rows`, [N, hidden]; they
        are not added yet. Nor are x and `residual` [T, hidden], which are overwritten.
        """
        first, second = self.norms
        if residual is None:
            x, residual = first(x), x
        else:
            first.fused.add_rms_norm_(x, residual, first.weight, first.eps)
        x = self.attention.compute(x, angles, rows)
        if rows is not None:
            residual = residual.index_select(0, rows)
            if len(rows) == 0:
                return x, residual
        second.fused.add_rms_norm_(x, residual, second.weight, second.eps)
        return self.block(x), residual


class Chain:
    """A whole decoder of such layers: one after the other, and nothing but them between embedding
    and final norm."""

    def __init__(
        self,
        embedding: nn.Module | None,
        layers: list[Layer],
        norm: Norm | None,
        angles: Tensor | None,
        step: Step,
    ) -> None:
        """`embedding` and `norm`: None on stages that have none. `angles`: float32 [positions,
        dim], as `FusedOps.rotate_` takes them, or None."""
        self._embedding, self._layers, self._norm = embedding, layers, norm
        self._angles, self._step = angles, step

    def __call__(self, ids: Tensor, positions: Tensor, hidden: Tensor | None) -> Tensor:
        """Of tokens `ids` [T] at `positions` [T], or what an earlier stage made of them, `hidden`
        [T, hidden]: [T, hidden], or of the step's sampled tokens alone."""
        return self.end(*self.run(self.begin(ids, hidden), positions))

    def begin(self, ids: Tensor, hidden: Tensor | None) -> Tensor:
        """[T, hidden] before the layers, new."""
        found: Tensor = self._embedding(ids) if hidden is None else hidden.clone()  # type: ignore
        return found

    def run(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the residual behind the last layer, which aren't added yet, for x
        [T, hidden], which is overwritten."""
        step = self._step
        step.calls = 0
        angles = None if self._angles is None else (positions, self._angles)
        residual: Tensor | None = None
        for layer in self._layers:
            rows = step.sampled if layer.is_last else None
            x, residual = layer.compute(x, residual, angles, rows)
        assert residual is not None
        return x, residual

    def end(self, x: Tensor, residual: Tensor) -> Tensor:
        """The same added, and behind the final norm if there is one; both are overwritten."""
        norm = self._norm
        if norm is None or len(x) == 0:
            return x.add_(residual)
        norm.fused.add_rms_norm_(x, residual, norm.weight, norm.eps)
        return x


def _of_rows(linear: Any) -> Callable[[Tensor], Tensor]:
    """[T, in] -> [T, out]"""
    found: Callable[[Tensor], Tensor] = getattr(linear, "of_rows", linear)
    return found


def _rows_of(block: nn.Module) -> Callable[[Tensor], Tensor]:
    """A block [1, T, hidden] of a model as one of rows [T, hidden]."""

    def compute(x: Tensor) -> Tensor:
        out = block(x[None])
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found.view(x.shape)

    return compute
