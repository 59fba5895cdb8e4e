"""Embeddings: how a prompt's hidden states become one vector, and the vector a reply has."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from engine.errors import RequestError

Pooling: TypeAlias = Literal["last", "mean"]
"""Of the hidden states behind the final norm: the prompt's last one, or the mean of all."""
FloatArray: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


def check_pooling(pooling: str) -> None:
    """Raise `RequestError` unless it is a `Pooling`."""
    if pooling not in get_args(Pooling):
        raise RequestError(f"pooling must be last or mean, not {pooling!r:.40}", "pooling")


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Raise `RequestError` unless a vector of `hidden_size` numbers can be cut to `dimensions`."""
    if dimensions is not None and not 1 <= dimensions <= hidden_size:
        shown = dimensions if abs(dimensions) < 2**64 else "a number of more than 64 bits"
        raise RequestError(
            f"dimensions must be between 1 and {hidden_size}, the model's hidden size, not {shown}",
            "dimensions",
        )


def read_embedding(data: bytes, dimensions: int | None, *, normalize: bool) -> FloatArray:
    """The embedding float32 [dimensions, or all] of a vector as messages carry it.

    It is cut first. With `normalize` its length is then 1 (a vector of zeros stays one).
    """
    vector = np.frombuffer(data, "<f4")[:dimensions].astype(np.float32)
    if not normalize:
        return vector
    wide = vector.astype(np.float64)  # the square of a large number must not overflow
    length = float(np.linalg.norm(wide))
    return (wide / length).astype(np.float32) if length > 0.0 else vector
