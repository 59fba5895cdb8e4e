"""`Experts`: a mixture's matrices, and the sum over those that a token is sent to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.device.distributed import ParallelState
from engine.layers.weight_format import WeightFormat


class Experts:
    """One layer's experts in the form that transformers keeps them: a module with `gate_up_proj` or
    `up_proj` and `down_proj`, each [experts, out, in] or transposed.

    Tokens are sorted by expert, so each expert that has some is two products. Of experts that
    tensor parallel ranks divide, a rank has some, and the ranks' sums are added.
    """

    def __init__(self, module: Any, form: WeightFormat, parallel: ParallelState) -> None:
        """The module's matrices are taken from it."""
        self._module = module
        count = len(module.down_proj)
        self._parallel = parallel if count < module.num_experts else ParallelState.single()
        self._first = self._parallel.tp_rank * count
        up = "gate_up_proj" if module.has_gate else "up_proj"
        self._up = [self._kernel(up, number, form) for number in range(count)]
        self._down = [self._kernel("down_proj", number, form) for number in range(count)]
        for name in (up, "down_proj"):
            setattr(module, name, None)

    def _kernel(self, name: str, number: int, form: WeightFormat) -> Any:
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
        module, k = self._module, chosen.shape[-1]
        out = torch.zeros_like(hidden)
        flat = chosen.reshape(-1)
        if self._parallel.tp_size > 1:
            flat, count = flat - self._first, len(self._up)
            flat = flat.masked_fill((flat < 0) | (flat >= count), count)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self._up)).tolist()
        tokens = order // k
        inputs = hidden.index_select(0, tokens)
        factors = weights.reshape(-1).index_select(0, order).unsqueeze(1)
        start = 0
        for up, down, count in zip(self._up, self._down, counts, strict=False):
            end = start + count
            if count:
                inner = up(inputs[start:end])
                inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
                found = down(inner.contiguous())
                if getattr(module, "has_post_expert_norm", False):  # older versions lack it
                    found = module.post_expert_norm(found)
                scaled = (found * factors[start:end]).to(out.dtype)
                out.index_add_(0, tokens[start:end], scaled)
            start = end
        return self._parallel.all_reduce(out)


def is_experts(module: nn.Module) -> bool:
    """Whether it is a mixture that transformers' experts interface computes."""
    return hasattr(module, "has_gate") and hasattr(module, "_apply_gate")
