"""Norms, feed-forward blocks, mixtures, attentions and layers that our kernels compute instead.

Each is tried at load: if ours gives the numbers of the model's own code, it takes its place. What
differs stays as it is. So no architecture is known here by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from engine.layers.experts import Experts, Mixture
from engine.layers.fused_ops import FusedOps
from engine.models.parts import Attention, Chain, Forward, GatedBlock, Layer, Norm, TiedEmbedding
from engine.models.share import AbsentLayer, NoEmbedding

_ROUNDING, _ROUNDING_16_BITS = 1e-5, 2e-2
"""How far numbers of one part may lie apart, both as root mean squares."""
_WHOLE = 10
"""What a whole model may add up to, in units of one part."""
_SCALES = (1.0, 0.03, 0.002)
"""Of random inputs: the smallest show what keeps a norm from dividing by 0."""
_ORDERED = 64
_EMBEDDINGS = (nn.Embedding, TiedEmbedding)
_NOTHING = (nn.Dropout, nn.Identity, AbsentLayer, NoEmbedding)
"""Modules that leave hidden states as they are."""
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))


@dataclass
class _Seen:
    """A module's only call in a forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first_call: int
    """Attention calls before it."""
    num_calls: int
    """Attention calls in it."""
    given: Tensor
    """A copy of the hidden states, which it may overwrite."""
    out: Any = None
    made: Any = None
    """A copy of the output's tensor."""

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


class Takeover:
    """Tries the parts of one decoder."""

    def __init__(
        self,
        decoder: nn.Module,
        step: Any,
        fused: FusedOps,
        heads: list[tuple[int, int]],
        run: Callable[[int, Chain | None], Tensor],
        num_positions: tuple[int, int],
        is_last_stage: bool,
    ) -> None:
        """`heads`: query and key/value heads of each attention call. `run` computes some tokens
        [T, hidden] at positions below a number, by the decoder or a chain, with an attention that
        looks at each token alone. `num_positions`: those that the model has, and those that steps
        have."""
        self._decoder, self._step, self._fused = decoder, step, fused
        self._heads, self._run_with, self._num_positions = heads, run, num_positions
        self._is_last_stage = is_last_stage
        self._called: set[nn.Module] = set()
        """The modules that a forward calls."""
        self._result = torch.empty(0)
        """What it gives."""
        self._norms: dict[nn.Module, nn.Module] = {}
        """By each norm of ours, the one whose place it has."""
        self._generator = torch.Generator().manual_seed(0)
        self.skips_unread = False
        """Whether the last layer is ours and may leave out tokens whose results nothing reads."""
        self.chain: Chain | None = None
        """The whole decoder, if it is nothing but layers of ours."""

    def _run(self) -> Tensor:
        return self._run_with(self._num_positions[0], None)

    @torch.inference_mode()
    def replace(self) -> None:
        """Let ours take the place of what computes the same."""
        before = self._run()
        seen = self._watch()
        for parent in list(self._decoder.modules()):
            for name, module in list(parent.named_children()):
                if module in seen and (norm := self._norm(module, seen[module])) is not None:
                    setattr(parent, name, norm)
                    self._norms[norm] = module
        for module in list(self._decoder.modules()):
            if module in seen:
                block = self._block(module, seen[module]) or self._mixture(module, seen)
                if block is not None:
                    module.forward = block.forward
        attentions: dict[nn.Module, Attention] = {}
        for module in list(self._decoder.modules()):
            if module in seen and (found := self._attention(module, seen[module])) is not None:
                attentions[module] = found
                module.forward = found.forward
        layers: dict[nn.Module, Layer] = {}
        for module in list(self._decoder.modules()):
            if module in seen:
                layer = self._layer(module, seen[module], attentions)
                if layer is not None:
                    layers[module] = layer
                    module.forward = layer.forward
        after = self._run()
        if layers and not _same(after, before, _WHOLE):
            for module in layers:  # something else reads what the layers overwrite
                del module.forward
        elif layers:
            self._find_last(layers, seen, after)
            chain, count = self._chain(layers, seen), min(self._num_positions)
            if chain is None:
                return
            if _same(self._run_with(count, chain), self._run_with(count, None), _WHOLE):
                self.chain = chain

    def _chain(self, layers: dict[nn.Module, Layer], seen: dict[nn.Module, _Seen]) -> Chain | None:
        """The layers one after the other, with what is called before and behind them."""
        ordered = sorted(layers, key=lambda module: seen[module].first_call)
        if [seen[module].first_call for module in ordered] != list(range(len(self._heads))):
            return None
        inside = {part for module in layers for part in module.modules()}
        outside = [part for part in self._decoder.modules() if part not in inside]
        embeddings = [p for p in outside if isinstance(p, _EMBEDDINGS) and p in self._called]
        norms = [part for part in outside if isinstance(part, Norm)]
        given = [seen[module].kwargs.get("position_embeddings") for module in ordered]
        if len(embeddings) > 1 or len(norms) > 1 or any(found is not given[0] for found in given):
            return None
        rotations = [part for part in outside if part in seen and seen[part].out is given[0]]
        path = [*embeddings, *ordered]
        if self._is_last_stage:
            path += [self._norms[norm] for norm in norms]
        starts = embeddings or any(isinstance(part, NoEmbedding) for part in self._called)
        if not starts or any(part not in seen for part in path):
            return None
        flow = [(seen[a].made, seen[b].given) for a, b in pairwise(path)]
        flow.append((seen[path[-1]].made, self._result[None]))
        if not all(isinstance(a, Tensor) and torch.equal(a, b) for a, b in flow):
            return None
        known = {*embeddings, *norms, *rotations}
        for part in self._called.intersection(outside).difference(known):
            if not isinstance(part, _NOTHING) and not any(part.children()):
                return None  # it may do anything between them
        table: Tensor | None = None
        if any(layer.attention.rotates for layer in layers.values()):
            if not rotations:
                return None
            table = _angles(rotations[0], seen[rotations[0]], self._num_positions[1])
        return Chain(
            next(iter(embeddings), None),
            [layers[module] for module in ordered],
            next(iter(norms), None) if self._is_last_stage else None,
            table,
            self._step,
        )

    def _find_last(
        self, layers: dict[nn.Module, Layer], seen: dict[nn.Module, _Seen], whole: Tensor
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
        self.skips_unread = _same(some, whole.index_select(0, rows))
        layers[last].is_last = self.skips_unread

    def _watch(self) -> dict[nn.Module, _Seen]:
        """The modules that are called once, with hidden states."""
        begun: dict[nn.Module, list[_Seen]] = {}
        step = self._step

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen = _Seen(args, kwargs, step.calls, 0, torch.empty(0))
            if isinstance(seen.hidden, Tensor):
                seen.given = seen.hidden.clone()
            begun.setdefault(module, []).append(seen)

        def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            seen = begun[module][-1]
            seen.num_calls, seen.out = step.calls - seen.first_call, out
            made = out[0] if isinstance(out, tuple) and out else out
            seen.made = made.clone() if isinstance(made, Tensor) else None

        hooks = []
        for module in self._decoder.modules():
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after, with_kwargs=True))
        try:
            self._result = self._run()
        finally:
            for hook in hooks:
                hook.remove()
        self._called = set(begun)
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

    def _block(self, module: Any, seen: _Seen) -> GatedBlock | None:
        product = _joint(module, _GATE_UP)
        if product is None or getattr(module, "down_proj", None) is None or seen.num_calls:
            return None
        block = GatedBlock(module, product, self._fused)
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

    def _attention(self, module: Any, seen: _Seen) -> Attention | None:
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
            attention = Attention(module, product, heads, rotates, self._step, self._fused)
            if rotates and not (isinstance(angles, tuple) and angles[0].shape[-1] == width):
                continue
            if self._agree(module.forward, attention.forward, seen):
                return attention
        return None

    def _layer(
        self, module: nn.Module, seen: _Seen, attentions: dict[nn.Module, Attention]
    ) -> Layer | None:
        children = list(module.children())
        inner = [child for child in children if child in attentions]
        norms = [child for child in children if isinstance(child, Norm)]
        blocks = [child for child in children if child not in inner and child not in norms]
        if (len(inner), len(norms), len(blocks), seen.num_calls) != (1, 2, 1, 1):
            return None
        layer = Layer(attentions[inner[0]], (norms[0], norms[1]), blocks[0], self._step)
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
            if not _same(results[1], results[0]):
                return False
        return True


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


def _angles(rotation: nn.Module, seen: _Seen, num_positions: int) -> Tensor:
    """Float32 [num_positions, dim]: half a row of cosines, half a row of sines."""
    positions = torch.arange(num_positions, device=seen.hidden.device)[None]

    def other(given: Any) -> Any:
        if not isinstance(given, Tensor):
            return given
        return given.float() if given.is_floating_point() else positions

    args = [other(given) for given in seen.args]
    cos, sin = rotation(*args, **{name: other(given) for name, given in seen.kwargs.items()})
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)
