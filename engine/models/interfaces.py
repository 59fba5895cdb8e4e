"""Transformers' interfaces: attention and experts are functions that are found by name."""

from __future__ import annotations

from torch import nn


def point_at(model: nn.Module, name: str) -> None:
    """Let every part of the model call the attention and experts functions of this name."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation_internal = name
            config._attn_implementation = name
        if config is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation_internal = name
            config._experts_implementation = name
