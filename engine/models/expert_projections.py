"""What adapters may change of a mixture's experts, and what a rank has of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from engine.layers.adapted import ExpertProjection
from engine.layers.experts import is_experts
from engine.models.share import Share


class ExpertSizes(NamedTuple):
    """Of a mixture's experts, before ranks divide them."""

    hidden: int
    inner: int
    outputs: int
    """Before the gate."""

    @classmethod
    def of(cls, module: Any) -> ExpertSizes:
        """Of a module that still has its parameters."""
        _, *up = (module.gate_up_proj if module.has_gate else module.up_proj).shape
        _, *down = module.down_proj.shape
        if module.is_transposed:
            return cls(up[0], down[0], up[1])
        return cls(up[1], down[1], up[0])


def expert_sizes(model: nn.Module) -> dict[str, ExpertSizes]:
    """Of each mixture, by name."""
    return {
        name: ExpertSizes.of(module) for name, module in model.named_modules() if is_experts(module)
    }


def expert_projections(
    name: str, module: Any, sizes: ExpertSizes, share: Share
) -> tuple[ExpertProjection, ExpertProjection]:
    """The products before and behind the gate of the mixture `module`, called `name`."""
    hidden, inner, outputs = sizes
    dims = (2, 1) if module.is_transposed else (1, 2)
    up = "gate_up_proj" if module.has_gate else "up_proj"
    gate = None
    if module.has_gate:
        parts = share.mixture_parts(f"{name}.{up}")
        in_turns = parts is not None and len(parts) == 1
        halves = slice(0, inner), slice(inner, None)
        gate = (slice(0, None, 2), slice(1, None, 2)) if in_turns else halves
    found = []
    for key, size, dim in ((up, (outputs, hidden), 0), ("down_proj", (hidden, inner), 1)):
        pieces = dict(share.pieces(f"{name}.{key}"))
        runs = pieces.get(0, [range(module.num_experts)])
        ranges = pieces.get(dims[dim], [range(size[dim])])
        found.append(
            ExpertProjection(
                f"{name}.{key}",
                *size,
                dim,
                tuple(ranges),
                name,
                module.num_experts,
                tuple(number for run in runs for number in run),
                gate if key == up else None,
            )
        )
    return found[0], found[1]
