"""Rotary position embedding (RoFormer, Su et al. 2021), with linear and llama3 scaling."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.checkpoint.model_config import RopeConfig
from engine.errors import ConfigError
from engine.layers.fused_ops import FusedOps

Angles = tuple[Tensor, Tensor]
"""`positions` and `cos_sin` of `FusedOps.rotate_`."""


class StepRope(Protocol):
    """The rotation of one step's tokens, the same for all layers. Overwrites its arguments."""

    @property
    def angles(self) -> Angles | None:
        """For kernels that look up the angles themselves; None: there is no such table."""
        ...

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [T, heads, head_dim], rotated."""
        ...

    def rotate_joint(self, qk: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        """q, the first `num_heads` of qk [T, heads, head_dim], and k, rotated."""
        ...


class RopeTables(NamedTuple):
    """Cosines and signed sines of one step's positions, [T, 1, head_dim]; same for all layers.

    The first half of `sin` is negated, so that rotating is x * cos + swap_halves(x) * sin.
    """

    cos: Tensor
    sin: Tensor

    @property
    def angles(self) -> None:
        return None

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, self), rotate(k, self)

    def rotate_joint(self, qk: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        # On CPU one pass over q and k costs less than two passes.
        qk = rotate(qk, self)
        return qk[:, :num_heads], qk[:, num_heads:]


class FusedRope(NamedTuple):
    """Rotates in place by one kernel, which looks up the angles itself, in float32."""

    fused: FusedOps
    positions: Tensor
    """int64 [T]"""
    cos_sin: Tensor
    """float32 [max_positions, head_dim]"""

    @property
    def angles(self) -> Angles:
        return self.positions, self.cos_sin

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        self.fused.rotate_(self.positions, q, k, self.cos_sin)
        return q, k

    def rotate_joint(self, qk: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        return self.rotate(qk[:, :num_heads], qk[:, num_heads:])


class RotaryEmbedding:
    """Float32 tables for positions [0, max_positions)."""

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        rope: RopeConfig,
        device: torch.device,
        fused: FusedOps | None = None,
    ) -> None:
        self.fused = fused
        inv_freq = _inverse_frequencies(head_dim, rope)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq)
        cos, sin = angles.cos(), angles.sin()
        if fused is not None:
            self.cos_sin = torch.cat((cos, sin), dim=-1).to(device)
            return
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)

    def lookup(self, positions: Tensor, dtype: torch.dtype) -> StepRope:
        """The rotation of tokens at int64 positions [T]."""
        if self.fused is not None:
            return FusedRope(self.fused, positions, self.cos_sin)
        cos = self.cos.index_select(0, positions).unsqueeze(1).to(dtype)
        sin = self.sin.index_select(0, positions).unsqueeze(1).to(dtype)
        return RopeTables(cos, sin)


def rotate(x: Tensor, tables: RopeTables) -> Tensor:
    """Rotate x [T, heads, head_dim]; returns a new contiguous tensor."""
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return torch.addcmul(swapped.mul_(tables.sin), x, tables.cos)


def _inverse_frequencies(head_dim: int, rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "default":
        return inv_freq
    try:
        if rope.rope_type == "linear":
            return inv_freq / float(rope.params["factor"])
        return _llama3_scaling(inv_freq, rope)
    except KeyError as error:
        raise ConfigError(
            f"config.json: RoPE scaling '{rope.rope_type}' lacks the parameter {error}."
        ) from error


def _llama3_scaling(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, medium ones partly."""
    factor = float(rope.params["factor"])
    low = float(rope.params["low_freq_factor"])
    high = float(rope.params["high_freq_factor"])
    context = float(rope.params["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > context / low, inv_freq / factor, inv_freq)
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(medium, blended, scaled)
