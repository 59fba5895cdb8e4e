"""`fix_rotations`: each cached token has one place, however long the texts of a step are."""

from __future__ import annotations

import logging

import torch
from torch import nn

logger = logging.getLogger(__name__)


@torch.inference_mode()
def fix_rotations(model: nn.Module, max_positions: int) -> None:
    """Let rotations whose angles depend on the longest text of a forward have those of texts of
    `max_positions`: a step has texts of all lengths, and what is cached stays as it is."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        grows = [name for name, kind in by_layer.items() if kind and _grows(kind)]
        for name in grows:
            more = {} if name is None else {"layer_type": name}
            device = next(module.buffers()).device
            module(torch.zeros(1, device=device), torch.tensor([[max_positions - 1]]), **more)
            logger.info("positions are rotated as in texts of %d tokens", max_positions)
        if grows:
            fixed = {name: "default" if name in grows else kind for name, kind in by_layer.items()}
            module.rope_type = fixed if isinstance(kinds, dict) else fixed[None]  # type: ignore


def _grows(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"
