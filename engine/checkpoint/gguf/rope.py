"""`rope_parameters`: how positions are rotated, as config.json says it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.checkpoint.gguf.checkpoint import GgufCheckpoint
from engine.checkpoint.gguf.header import GgufTensor
from engine.errors import ConfigError

_LLAMA3_CONTEXTS = [2**power for power in range(5, 21)]
"""What the length that a model was first trained with may be, in tokens."""
_LLAMA3_FREQ_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""All models have these."""
_LIMIT = 1e-4
"""By which recomputed factors may differ from those of the file, which are in float32."""


def rope_parameters(name: str, head_dim: int, checkpoint: GgufCheckpoint) -> dict[str, Any]:
    """`rope_parameters` of config.json of a model of the architecture `name`. Raises `ConfigError`
    if the file scales frequencies in a way that can't be said there."""
    metadata, tensors = checkpoint
    theta = metadata.get(f"{name}.rope.freq_base")
    theta = 10000.0 if theta is None else metadata.number(f"{name}.rope.freq_base")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    key = f"{name}.rope.scaling.type"
    kind = "none" if metadata.get(key) is None else metadata.text(key)
    original = metadata.optional_size(f"{name}.rope.scaling.original_context_length")
    if "rope_factors_long.weight" in tensors or "rope_factors_short.weight" in tensors:
        return found | _longrope(name, original, head_dim, checkpoint)
    if kind in ("linear", "yarn"):
        key = f"{name}.rope.scaling.factor"
        factor = metadata.get(key)
        is_none = factor is None or (isinstance(factor, int | float) and factor in (0, 1))
        if not is_none:
            found |= {"rope_type": kind, "factor": metadata.number(key)}
        if kind == "yarn" and original is not None:
            found["original_max_position_embeddings"] = original
    elif kind != "none":
        raise ConfigError(
            f"{metadata.path} scales positions in the way {kind!r:.80}, which Manta can't read "
            "from GGUF files; use the model's safetensors checkpoint."
        )
    if "rope_freqs.weight" in tensors:
        factors = _numbers(checkpoint, "rope_freqs.weight", head_dim)
        found |= _llama3(theta, original, factors, checkpoint)
    return found


def llama3_factors(
    theta: float, count: int, factor: float, low: float, high: float, context: int
) -> np.ndarray:
    """By what Llama 3.1 divides each of `count` frequencies, float64. (`LlamaRotaryEmbedding`.)"""
    wavelengths = 2 * math.pi * theta ** (np.arange(count) / count)
    smooth = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _llama3(
    theta: float, original: int | None, factors: np.ndarray, checkpoint: GgufCheckpoint
) -> dict[str, Any]:
    """The file has what each frequency is divided by, and not what that was computed of."""
    if np.all(factors == 1.0):
        return {}
    factor = float(factors.max())
    low, high = _LLAMA3_FREQ_FACTORS.values()
    for context in [original] if original else _LLAMA3_CONTEXTS:
        made = llama3_factors(theta, len(factors), factor, low, high, context)
        if np.allclose(made, factors, rtol=_LIMIT, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                **_LLAMA3_FREQ_FACTORS,
                "original_max_position_embeddings": context,
            }
    raise ConfigError(
        f"{checkpoint.metadata.path} scales the frequencies of rotation by factors "
        "('rope_freqs.weight') that aren't those of Llama 3; use the model's safetensors "
        "checkpoint."
    )


def _longrope(
    name: str, original: int | None, head_dim: int, checkpoint: GgufCheckpoint
) -> dict[str, Any]:
    if original is None:
        key = f"{name}.rope.scaling.original_context_length"
        raise ConfigError(f"{checkpoint.metadata.path} lacks the key '{key}'.")
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "long_factor": _numbers(checkpoint, "rope_factors_long.weight", head_dim).tolist(),
        "short_factor": _numbers(checkpoint, "rope_factors_short.weight", head_dim).tolist(),
    }


def _numbers(checkpoint: GgufCheckpoint, name: str, head_dim: int) -> np.ndarray:
    """A number for each frequency, float64."""
    tensor: GgufTensor | None = checkpoint.tensors.get(name)
    if tensor is None or tensor.kind.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ConfigError(
            f"{checkpoint.metadata.path} must have '{name}' as {head_dim // 2} numbers of the type "
            "F32."
        )
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        values = np.frombuffer(file.read(tensor.num_bytes), "<f4").astype(np.float64)
    if not np.all(np.isfinite(values) & (values > 0)):
        raise ConfigError(f"{checkpoint.metadata.path}: the numbers of '{name}' must be above 0.")
    return values
