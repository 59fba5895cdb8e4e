"""`Experts`: a mixture's matrices, and the sum over those that a token is sent to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.layers.adapted import ExpertAdapters
from engine.layers.expert_counts import ExpertCounts
from engine.layers.expert_share import ExpertShare
from engine.layers.linear_kernel import GroupedKernel, LinearKernel, NativeKernel
from engine.layers.weight_format import WeightFormat
from engine.native.library import require_kernels

_KERNELS = "manta_kernels"


def set_kernels(module: Any, name: str, kernels: Any) -> None:
    """Give a mixture its parameter `name` as products with each expert of the rank, which a
    `WeightFormat` made (`experts`). What stands for it is of its type, takes no memory, and is
    zero."""
    nothing = torch.zeros((), dtype=getattr(module, name).dtype).expand(len(kernels), 1, 1)
    weight = nn.Parameter(nothing, False)
    weight._is_hf_initialized = True  # type: ignore[attr-defined]
    setattr(module, name, weight)
    setattr(module, _KERNELS, {**getattr(module, _KERNELS, {}), name: kernels})


def take_kernels(module: Any) -> dict[str, Any]:
    """What `set_kernels` gave, by name; the module loses them."""
    made: dict[str, Any] = module.__dict__.pop(_KERNELS, {})
    return made


class Experts:
    """One layer's experts in the form that transformers keeps them: a module with `gate_up_proj` or
    `up_proj` and `down_proj`, each [experts, out, in] or transposed.

    Tokens are sorted by expert, so each expert that has some is two products; on CPU mostly in one
    call of our kernels. Of experts that tensor parallel ranks divide, a rank has some, or a part of
    each, and the ranks' sums are added.
    """

    def __init__(self, module: Any, form: WeightFormat, share: ExpertShare) -> None:
        """The module's matrices or products (`set_kernels`), which are those of `share`, are taken
        from it."""
        self._module, self.share = module, share
        self.adapters: ExpertAdapters | None = None
        self.counts: ExpertCounts | None = None
        """Set: added to by whoever calls, but by a `Mixture` itself."""
        up = "gate_up_proj" if module.has_gate else "up_proj"
        dtype = getattr(module, up).dtype
        made: dict[str, list[LinearKernel]] = take_kernels(module)
        self._up, self._down = (
            made.get(name) or [self._kernel(name, number, form) for number in range(share.count)]
            for name in (up, "down_proj")
        )
        for name in (up, "down_proj"):
            setattr(module, name, None)
        self.weights = self._in_one_call(dtype)
        """All matrices for one call of our kernels; None: each expert is multiplied on its own."""

    def _in_one_call(self, dtype: torch.dtype) -> Any:
        """For experts in our kernels' form whose gate is silu(gate) * up, gate first, as random
        input shows."""
        module = self._module
        norm = getattr(module, "has_post_expert_norm", False)  # older versions lack it
        weights = None if not module.has_gate or module.has_bias or norm else self._weights()
        if weights is None:
            return None
        generator = torch.Generator().manual_seed(0)
        sample = (torch.randn((8, 2 * weights.inner), generator=generator) * 8).to(dtype)
        kernels = require_kernels()
        with torch.no_grad():
            wanted, found = module._apply_gate(sample), kernels.silu_and_mul(sample)
        if wanted.shape != found.shape or not torch.allclose(wanted, found, atol=1e-2, rtol=1e-2):
            return None
        return weights

    def _weights(self) -> Any:
        """All matrices; None: some are plain, and some are quantized."""
        kernels, count = require_kernels(), self.share.count
        ups = [up.packed for up in self._up if isinstance(up, NativeKernel)]
        downs = [down.packed for down in self._down if isinstance(down, NativeKernel)]
        if len(ups) == len(downs) == count:
            return kernels.ExpertWeights(ups, downs, downs[0].shape[1])
        both = [
            [kernel for kernel in side if isinstance(kernel, GroupedKernel)]
            for side in (self._up, self._down)
        ]
        if not all(len(side) == count for side in both):
            return None
        short = both[0][0].short_inputs
        return kernels.ExpertWeights(*([one.weights for one in side] for side in both), short)

    def _kernel(self, name: str, number: int, form: WeightFormat) -> LinearKernel:
        weight = getattr(self._module, name).data[number]
        if self._module.is_transposed:
            weight = weight.t()
        bias: Tensor | None = None
        if self._module.has_bias:
            bias = getattr(self._module, f"{name}_bias").data[number].contiguous()
        return form.linear(weight.contiguous(), bias)

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]: of each token the sum of its `chosen` int64 [T, k] experts,
        by `weights` [T, k]. A number that is no expert's adds nothing."""
        return self.sum(hidden, chosen, weights, self.changed_rows(len(hidden)))

    def changed_rows(self, num_rows: int) -> Tensor | None:
        """`ExpertAdapters.changed_rows`. Every call asks once."""
        return None if self.adapters is None else self.adapters.changed_rows(num_rows)

    def sum(
        self, hidden: Tensor, chosen: Tensor, weights: Tensor, changed: Tensor | None
    ) -> Tensor:
        """`__call__`, where adapters change what experts are for the tokens `changed`. A token's
        result is the same in any batch."""
        if changed is None or self.adapters is None:
            out = self._all(hidden, chosen, weights)
        else:
            out = torch.empty_like(hidden)
            slots = self.adapters.step.of_rows(len(hidden)).slots
            out[changed] = self._one_by_one(
                hidden[changed], chosen[changed], weights[changed], slots[changed]
            )
            others = ~changed
            if bool(others.any()):
                out[others] = self._all(hidden[others], chosen[others], weights[others])
        return self.share.sum_over.all_reduce(out)

    def _all(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if self.weights is None:
            return self._one_by_one(hidden, chosen, weights)
        numbers, factors = self.share.local(chosen).contiguous(), weights.float().contiguous()
        out: Tensor = require_kernels().experts(hidden, numbers, factors, self.weights)
        return out

    def _one_by_one(
        self, hidden: Tensor, chosen: Tensor, weights: Tensor, slots: Tensor | None = None
    ) -> Tensor:
        """With `slots` int32 [T], those of the tokens' adapters."""
        module, k = self._module, chosen.shape[-1]
        out = torch.zeros_like(hidden)
        flat, count = self.share.local(chosen.reshape(-1)), self.share.count
        if self.share.sum_over.tp_size > 1:
            flat = flat.masked_fill((flat < 0) | (flat >= count), count)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self._up)).tolist()
        tokens = order // k
        inputs = hidden.index_select(0, tokens)
        factors = weights.reshape(-1).index_select(0, order).unsqueeze(1)
        start = 0
        adapters = None if slots is None else self.adapters
        for up, down, count in zip(self._up, self._down, counts, strict=False):
            end = start + count
            if count:
                inner = up(inputs[start:end])
                if adapters is not None and slots is not None:
                    rows = adapters.of_experts(slots[tokens[start:end]], flat[order[start:end]])
                    adapters.up.add(inner, inputs[start:end], rows)
                inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
                inner = inner.contiguous()
                found = down(inner)
                if adapters is not None:
                    adapters.down.add(found, inner, rows)
                if getattr(module, "has_post_expert_norm", False):  # older versions lack it
                    found = module.post_expert_norm(found)
                scaled = (found * factors[start:end]).to(out.dtype)
                out.index_add_(0, tokens[start:end], scaled)
            start = end
        return out


class Mixture:
    """A softmax router and its experts as one call of our kernels."""

    def __init__(self, router: Tensor, top_k: int, normalized: bool, experts: Experts) -> None:
        """`router` [experts, hidden]. `normalized`: the weights of a token's experts add up to 1.
        Raises `ValueError` for experts that are not one call."""
        if experts.weights is None:
            raise ValueError("these experts are multiplied one by one")
        kernels = require_kernels()
        self._multiply = kernels.mixture
        self._router, self._routes = kernels.pack(router.contiguous()), len(router)
        self.normalized = normalized
        self._top_k, self._experts = top_k, experts
        self._linear = kernels.linear
        self._places = experts.share.local(torch.arange(self._routes)).contiguous()

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """int64 and like x, [T, k]: the experts of each token, and their weights, as the kernel
        finds them."""
        logits = self._linear(x, self._router, None, self._routes, False).float()
        best, chosen = logits.sort(descending=True, stable=True)
        best, chosen = best[:, : self._top_k], chosen[:, : self._top_k]
        found = best.softmax(-1) if self.normalized else (best - logits.logsumexp(-1, True)).exp()
        if self._experts.counts is not None:
            self._experts.counts.add(chosen, None)
        return chosen, found.to(x.dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]"""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.of_rows(rows).view(hidden_states.shape)

    def of_rows(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        experts = self._experts
        changed = experts.changed_rows(len(x))
        if changed is not None:
            return experts.sum(x, *self._choose(x), changed)
        out: Tensor = self._multiply(
            x,
            self._router,
            self._routes,
            self._top_k,
            self.normalized,
            self._places,
            None if experts.counts is None else experts.counts.sums,
            experts.weights,
        )
        return experts.share.sum_over.all_reduce(out)


def is_experts(module: nn.Module) -> bool:
    """Whether it is a mixture that transformers' experts interface computes."""
    return hasattr(module, "has_gate") and hasattr(module, "_apply_gate")
