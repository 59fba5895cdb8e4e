"""`GroupedExperts`: a mixture on CUDA, as grouped products that the host needn't wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.adapted import ExpertAdapters
from engine.layers.expert_counts import ExpertCounts
from engine.layers.expert_share import ExpertShare
from engine.layers.experts import take_kernels
from engine.layers.gpu_experts import GpuExperts


class GroupedExperts:
    """`Experts` on CUDA: the same module and arguments, two products for all experts.

    Which tokens an expert has stays on the device, so that a step can be captured in a graph and
    launched ahead. Sums have a fixed order. (Of plain matrices, torch has kernels for bfloat16;
    other types wait for the device in each product, and can't be captured.)
    """

    def __init__(self, module: Any, share: ExpertShare) -> None:
        """The module's matrices or products (`set_kernels`) are those of `share`."""
        self._module, self._share = module, share
        self.packed: Mapping[str, GpuExperts] = take_kernels(module)
        """Matrices that are quantized, by name."""
        self.counts: ExpertCounts | None = None
        """Set: added to by whoever calls."""
        self.adapters: ExpertAdapters | None = None
        self._up_name = "gate_up_proj" if module.has_gate else "up_proj"

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]: of each token the sum of its `chosen` int64 [T, k] experts,
        by `weights` [T, k]. A number that is no expert's adds nothing."""
        module, k = self._module, chosen.shape[-1]
        flat, count = self._share.local(chosen.reshape(-1)), self._share.count
        flat = flat.masked_fill((flat < 0) | (flat >= count), count)
        experts, order = flat.sort(stable=True)
        # Where each expert's tokens end; those of none stand behind them all.
        bounds = torch.arange(count, device=flat.device)
        ends = torch.searchsorted(experts, bounds, right=True).int()
        tokens = order // k
        given = hidden[tokens]
        inner = self._product(self._up_name, given, experts, ends)
        adapters = self.adapters
        adapted = None if adapters is None else adapters.rows_of(len(hidden))
        if adapters is not None and adapted is not None:
            rows = adapters.of_experts(adapted.slots[tokens], experts)
            adapters.up.add(inner, given, rows)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        found = self._product("down_proj", inner, experts, ends)
        if adapters is not None and adapted is not None:
            adapters.down.add(found, inner, rows)
        if getattr(module, "has_post_expert_norm", False):  # older versions lack it
            found = module.post_expert_norm(found)
        # The products leave the rows of no expert as they were allocated.
        found = found.masked_fill((experts == count).unsqueeze(1), 0)
        by_choice = torch.empty_like(found).index_copy_(0, order, found).view(*chosen.shape, -1)
        out = (by_choice * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
        return self._share.sum_over.all_reduce(out)

    def _product(self, name: str, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """`rows` [T * k, in], sorted by expert, by their experts' matrices: [T * k, out]."""
        packed = self.packed.get(name)
        if packed is not None:
            return packed(rows, ends)
        matrices: Tensor = getattr(self._module, name)
        if not self._module.is_transposed:
            matrices = matrices.transpose(1, 2)
        out = F.grouped_mm(rows, matrices, offs=ends)
        if self._module.has_bias:
            biases: Tensor = getattr(self._module, f"{name}_bias")
            out = out + biases[experts.clamp(max=self._share.count - 1)]
        return out
