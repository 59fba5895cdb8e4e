"""How ranks can divide the experts of a mixture: each rank some of them, or a part of each.

The second way is tried: what a part of the gate's inputs gives has to be that part of its outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.layout import Cut, MixtureCut, Part

MAX_INNER = 1 << 18
"""Inner numbers of an expert. With more, nothing is tried."""
_ROWS = 4

Parts = tuple[Part, ...]


def mixture_cut(name: str, module: Any) -> MixtureCut | None:
    """How ranks divide the mixture `module`, built on `meta`, of this name; None: they can't."""
    own = dict(module.named_parameters(recurse=False))
    if not own or any(len(value) != module.num_experts for value in own.values()):
        return None
    down, up = "down_proj", "gate_up_proj" if module.has_gate else "up_proj"
    in_dim, out_dim = (1, 2) if module.is_transposed else (2, 1)
    inner = own[down].shape[in_dim]
    up_parts = _up_parts(module, inner)
    divided: dict[str, tuple[int, Parts]] = {}
    known = {up, down, f"{up}_bias", f"{down}_bias"}
    has_norm = getattr(module, "has_post_expert_norm", False)  # older versions lack it
    if up_parts and not has_norm and own.keys() <= known:
        divided = {down: (in_dim, (Part(inner, inner),)), up: (out_dim, up_parts)}
        if module.has_bias:
            divided[f"{up}_bias"] = (1, up_parts)
    return MixtureCut(
        name,
        module.num_experts,
        inner if divided else 0,
        tuple(
            Cut(f"{name}.{key}", dim, parts, own[key].numel())
            for key, (dim, parts) in divided.items()
        ),
        {f"{name}.{key}": own[key].numel() for key in own.keys() - divided.keys()},
    )


def _up_parts(module: Any, inner: int) -> Parts:
    """The parts of an expert's outputs before its gate, of which each rank has an equal share: all
    gates, then all ups, or in turns. () if no share can be had by itself."""
    if not 1 < inner <= MAX_INNER:
        return ()
    half = Part(inner, inner)
    choices: list[Parts] = [(half, half), (Part(2 * inner, inner),)]
    if not module.has_gate:
        choices = [(half,)]
    return next((parts for parts in choices if _is_right(module, inner, parts)), ())


def _is_right(module: Any, inner: int, parts: Parts) -> bool:
    """Whether a share of `parts` gives a share of the gate's outputs."""
    count = next(n for n in range(2, inner + 1) if inner % n == 0)
    cut, size = Cut("", 1, parts, 0), sum(part.size for part in parts)
    generator = torch.Generator().manual_seed(0)
    sample = 4 * torch.randn((_ROWS, size), generator=generator)
    gate = module._apply_gate if module.has_gate else module.act_fn
    try:
        whole: Tensor = gate(sample)
        for rank in (0, count - 1):
            mine = torch.cat([sample[:, r.start : r.stop] for r in cut.ranges(count, rank)], 1)
            share = Part(inner, inner).share(count, rank)
            found, wanted = gate(mine), whole[:, share.start : share.stop]
            if found.shape != wanted.shape or not torch.allclose(found, wanted, atol=1e-5):
                return False
    except Exception:  # the code of any model, called with a part of what it is made for
        return False
    return True
