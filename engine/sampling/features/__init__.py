"""What requests may ask of the sampler, one file for each thing."""

from __future__ import annotations

from engine.sampling.features.base import Adjustment
from engine.sampling.features.logit_bias import LogitBias
from engine.sampling.features.min_tokens import MinTokens
from engine.sampling.features.penalties import Penalties

ADJUSTMENTS: tuple[type[Adjustment], ...] = (LogitBias, MinTokens, Penalties)
"""What changes logits before the draw, in vLLM's order."""
