"""Transformers' interfaces: attention and experts are functions that are found by name."""

from __future__ import annotations

from torch import nn


def point_at(model: nn.Module, name: str, experts: str | None = None) -> None:
    """Let every part of the model call the attention function of this name, and the experts
    function of the same or of another."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation_internal = name
            config._attn_implementation = name
        if config is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation_internal = experts or name
            config._experts_implementation = experts or name
