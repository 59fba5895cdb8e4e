"""Norms, feed-forward blocks, mixtures, attentions and layers that our kernels compute instead.

Each is tried at load: if ours gives the numbers of the model's own code, it takes its place. What
differs stays as it is. So no architecture is known here by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.layers.experts import Experts, Mixture
from engine.layers.fused_ops import FusedOps

_ROUNDING, _ROUNDING_16_BITS = 1e-5, 2e-2
"""How far numbers of one part may lie apart, both as root mean squares."""
_WHOLE = 10
"""What a whole model may add up to, in units of one part."""
_SCALES = (1.0, 0.03, 0.002)
"""Of random inputs: the smallest show what keeps a norm from dividing by 0."""
_ORDERED = 64
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))

Forward = Callable[..., Any]


class Step(Protocol):
    """What parts ask of the step that is computed."""

    sampled: Tensor | None
    """int64 [N]: the only tokens whose results are read; None: all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None) -> Tensor:
        """The next attention call: q and k [T, heads, k_dim], v [T, heads, v_dim] -> [T, width];
        of the tokens `rows` [N] alone [N, width]."""
        ...

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """For cosines and sines [1, T, dim] of a step: the rows [T] and the table [T, dim] of
        `FusedOps.rotate_`."""
        ...


@dataclass
class _Seen:
    """A module's only call in a forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first_call: int
    """Attention calls before it."""
    num_calls: int
    """Attention calls in it."""

    @property
    def hidden(self) -> Any:
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    def call(self, forward: Forward, hidden: Tensor) -> Tensor:
        """The output's tensor for other hidden states."""
        kwargs = dict(self.kwargs)
        args = self.args
        if args:
            args = (hidden, *args[1:])
        else:
            kwargs["hidden_states"] = hidden
        out = forward(*args, **kwargs)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found


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


class _GatedBlock:
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, module: Any, product: Any, fused: FusedOps) -> None:
        self.down, self.product, self.fused = module.down_proj, product, fused

    def forward(self, hidden_states: Tensor) -> Tensor:
        inner = self.fused.silu_and_mul(self.product.whole(hidden_states))
        out: Tensor = self.down(inner)
        return out.view(*hidden_states.shape[:-1], out.shape[-1])


class _Attention:
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
        self.product, self.out, self.rotates = product, module.o_proj, rotates
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
        return self.compute(hidden_states, position_embeddings, None)[None], None

    def compute(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None, rows: Tensor | None
    ) -> Tensor:
        """[..., hidden] of T tokens -> [T, hidden], or [N, hidden] of the tokens `rows`."""
        joint = self.num_heads + self.num_kv_heads
        qkv = self.product.whole(x)
        qkv = qkv.view(len(qkv), joint + self.num_kv_heads, -1)
        q, k, v = qkv[:, : self.num_heads], qkv[:, self.num_heads : joint], qkv[:, joint:]
        if isinstance(self.q_norm, Norm) and isinstance(self.k_norm, Norm):
            q, k = self.q_norm.of_heads(q), self.k_norm.of_heads(k)
        if self.rotates:
            assert angles is not None
            places, table = self.step.angles(*angles)
            self.fused.rotate_(places, q, k, table)
        out: Tensor = self.out(self.step.attend(q, k, v, rows))
        return out


class _Layer:
    """x + attention(norm(x)), and from that y + block(norm(y))."""

    def __init__(
        self, attention: _Attention, norms: tuple[Norm, Norm], block: nn.Module, step: Step
    ) -> None:
        self.attention, self.norms, self.step = attention, norms, step
        is_ours = isinstance(getattr(block.forward, "__self__", None), _GatedBlock | Mixture)
        self.block: Forward = block.forward if is_ours else block
        self.is_last = False

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        first, second = self.norms
        x = hidden_states.view(-1, hidden_states.shape[-1])
        rows = self.step.sampled if self.is_last else None
        y = self.attention.compute(first(x), position_embeddings, rows)
        if rows is not None:
            x = x.index_select(0, rows)
            if len(rows) == 0:
                return x[None]
        second.fused.add_rms_norm_(y, x, second.weight, second.eps)
        out = self.block(y[None])
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found.add_(x)


class Takeover:
    """Tries the parts of one decoder."""

    def __init__(
        self,
        decoder: nn.Module,
        step: Any,
        fused: FusedOps,
        heads: list[tuple[int, int]],
        run: Callable[[], Tensor],
    ) -> None:
        """`heads`: query and key/value heads of each attention call. `run` computes some tokens
        [T, hidden] with an attention that looks at each token alone."""
        self._decoder, self._step, self._fused = decoder, step, fused
        self._heads, self._run = heads, run
        self._generator = torch.Generator().manual_seed(0)
        self.skips_unread = False
        """Whether the last layer is ours and may leave out tokens whose results nothing reads."""

    @torch.inference_mode()
    def replace(self) -> None:
        """Let ours take the place of what computes the same."""
        before = self._run()
        seen = self._watch()
        for parent in list(self._decoder.modules()):
            for name, module in list(parent.named_children()):
                if module in seen and (norm := self._norm(module, seen[module])) is not None:
                    setattr(parent, name, norm)
        for module in list(self._decoder.modules()):
            if module in seen:
                block = self._block(module, seen[module]) or self._mixture(module, seen)
                if block is not None:
                    module.forward = block.forward
        attentions: dict[nn.Module, _Attention] = {}
        for module in list(self._decoder.modules()):
            if module in seen and (found := self._attention(module, seen[module])) is not None:
                attentions[module] = found
                module.forward = found.forward
        layers: dict[nn.Module, _Layer] = {}
        for module in list(self._decoder.modules()):
            if module in seen:
                layer = self._layer(module, seen[module], attentions)
                if layer is not None:
                    layers[module] = layer
                    module.forward = layer.forward
        after = self._run()
        if layers and not self._same(after, before, _WHOLE):
            for module in layers:  # something else reads what the layers overwrite
                del module.forward
        elif layers:
            self._find_last(layers, seen, after)

    def _find_last(
        self, layers: dict[nn.Module, _Layer], seen: dict[nn.Module, _Seen], whole: Tensor
    ) -> None:
        last = max(layers, key=lambda module: seen[module].first_call)
        if seen[last].first_call != len(self._heads) - 1:
            return
        layers[last].is_last = True
        rows = torch.tensor([1, 4], device=whole.device)
        self._step.sampled = rows
        try:
            some = self._run()
        finally:
            self._step.sampled = None
        self.skips_unread = self._same(some, whole.index_select(0, rows))
        layers[last].is_last = self.skips_unread

    def _watch(self) -> dict[nn.Module, _Seen]:
        """The modules that are called once, with hidden states."""
        begun: dict[nn.Module, list[_Seen]] = {}
        step = self._step

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            begun.setdefault(module, []).append(_Seen(args, kwargs, step.calls, 0))

        def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            seen = begun[module][-1]
            seen.num_calls = step.calls - seen.first_call

        hooks = []
        for module in self._decoder.modules():
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after, with_kwargs=True))
        try:
            self._run()
        finally:
            for hook in hooks:
                hook.remove()
        return {
            module: calls[0]
            for module, calls in begun.items()
            if len(calls) == 1 and isinstance(calls[0].hidden, Tensor)
        }

    def _norm(self, module: nn.Module, seen: _Seen) -> Norm | None:
        weight = getattr(module, "weight", None)
        only = [name for name, _ in module.named_parameters()] == ["weight"]
        if not only or not isinstance(weight, Tensor) or weight.ndim != 1:
            return None
        if weight.shape[0] != seen.hidden.shape[-1] or weight.dtype != seen.hidden.dtype:
            return None
        values = {v for v in vars(module).values() if isinstance(v, float) and 0 < v < 0.01}
        own = module.forward
        for eps in values:
            for scale in (weight.data, (weight.data.float() + 1).to(weight.dtype)):
                norm = Norm(scale.clone(), eps, self._fused)
                if self._agree(own, norm.forward, seen):
                    return norm
        return None

    def _block(self, module: Any, seen: _Seen) -> _GatedBlock | None:
        product = _joint(module, _GATE_UP)
        if product is None or getattr(module, "down_proj", None) is None or seen.num_calls:
            return None
        block = _GatedBlock(module, product, self._fused)
        return block if self._agree(module.forward, block.forward, seen) else None

    def _mixture(self, module: Any, seen: dict[nn.Module, _Seen]) -> Mixture | None:
        children = list(module.children())
        inner = [child for child in children if child in seen and hasattr(child, "manta_experts")]
        if len(inner) != 1 or len(children) != 2:
            return None
        experts: Any = inner[0].manta_experts
        router = next(child for child in children if child is not inner[0])
        weights = dict(router.named_parameters())
        weight, call = weights.get("weight"), seen[module]
        if not isinstance(experts, Experts) or experts.weights is None or weight is None:
            return None
        if len(weights) != 1 or weight.ndim != 2 or weight.shape[1] != call.hidden.shape[-1]:
            return None
        if weight.dtype != call.hidden.dtype or len(call.args) + len(call.kwargs) != 1:
            return None
        numbers = [
            x for x in seen[inner[0]].args if isinstance(x, Tensor) and x.dtype == torch.long
        ]
        if len(numbers) != 1 or not isinstance(module(*call.args, **call.kwargs), Tensor):
            return None
        top_k = numbers[0].shape[-1]

        def clear(rows: Tensor) -> Tensor:
            """Those whose experts no rounding changes come first."""
            best = (rows.float() @ weight.float().t()).topk(min(top_k + 1, len(weight))).values
            return rows[(best[:, top_k - 1] - best[:, -1]).argsort(descending=True)]

        mixture = Mixture(weight, top_k, True, experts)
        for mixture.normalized in (True, False):
            if self._agree(module.forward, mixture.forward, call, clear):
                return mixture
        return None

    def _attention(self, module: Any, seen: _Seen) -> _Attention | None:
        product = _joint(module, _QKV)
        if product is None or getattr(module, "o_proj", None) is None or seen.num_calls != 1:
            return None
        heads = self._heads[seen.first_call]
        width, rest = divmod(product.out_size, heads[0] + 2 * heads[1])
        norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        of_heads = all(isinstance(norm, Norm) and norm.weight.shape[0] == width for norm in norms)
        if rest or not (of_heads or norms == [None, None]):
            return None
        angles = seen.kwargs.get("position_embeddings")
        for rotates in (True, False):
            attention = _Attention(module, product, heads, rotates, self._step, self._fused)
            if rotates and not (isinstance(angles, tuple) and angles[0].shape[-1] == width):
                continue
            if self._agree(module.forward, attention.forward, seen):
                return attention
        return None

    def _layer(
        self, module: nn.Module, seen: _Seen, attentions: dict[nn.Module, _Attention]
    ) -> _Layer | None:
        children = list(module.children())
        inner = [child for child in children if child in attentions]
        norms = [child for child in children if isinstance(child, Norm)]
        blocks = [child for child in children if child not in inner and child not in norms]
        if (len(inner), len(norms), len(blocks), seen.num_calls) != (1, 2, 1, 1):
            return None
        layer = _Layer(attentions[inner[0]], (norms[0], norms[1]), blocks[0], self._step)
        return layer if self._agree(module.forward, layer.forward, seen) else None

    def _agree(
        self,
        own: Forward,
        ours: Forward,
        seen: _Seen,
        order: Callable[[Tensor], Tensor] | None = None,
    ) -> bool:
        """Whether both give the same for random hidden states of any size: the first that `order`
        makes of more rows [N, hidden]."""
        hidden = seen.hidden
        shape = hidden.shape if order is None else (_ORDERED, hidden.shape[-1])
        for scale in _SCALES:
            random = torch.randn(shape, generator=self._generator) * scale
            given = random.to(hidden.device, hidden.dtype)
            if order is not None:
                given = order(given)[: hidden[..., 0].numel()].view(hidden.shape)
            results = []
            for forward in (own, ours):
                self._step.calls = seen.first_call
                results.append(seen.call(forward, given.clone()))
            if not self._same(results[1], results[0]):
                return False
        return True

    @staticmethod
    def _same(a: Tensor, b: Tensor, parts: int = 1) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        rounding = _ROUNDING if a.dtype == torch.float32 else _ROUNDING_16_BITS
        x, y = a.float(), b.float()
        return bool((x - y).norm() <= rounding * parts * y.norm())


def _joint(module: Any, names: tuple[tuple[str, ...], ...]) -> Any:
    """The product that computes one of the lists of linears and nothing else; None if none does."""
    for group in names:
        products = [getattr(getattr(module, name, None), "product", None) for name in group]
        first = products[0]
        if first is not None and all(product is first for product in products):
            return first if len(first.sizes) == len(group) else None
    return None
