"""`model_digest`: tells whether two servers give the same tokens to a request."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from engine.config import ResolvedConfig

WHOLE_BYTES = 16 << 20
"""Files up to this size are read whole."""
NUM_SAMPLES = 64
SAMPLE_BYTES = 64 << 10
_KEYS = (
    *("dtype", "quantization", "activation_quantization", "kv_cache_dtype"),
    *("load_format", "seed", "generation_config"),
)
"""Of the configuration: what changes numbers otherwise than by rounding."""


def model_digest(resolved: ResolvedConfig, *more: str) -> str:
    """Of the files in the model's folder, of the configuration's keys that change what is computed,
    and of `more`. 32 hex digits.

    Of larger files (weights) it takes the size, and `NUM_SAMPLES` pieces at even distances: a
    checkpoint of 100 GB is not to be read for this, and other weights differ everywhere.
    Raises `OSError`.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(resolved.model.path).iterdir()):
        if path.is_file():
            digest.update(f"{path.name}\0".encode())
            _add_file(digest, path)
    keys = {key: getattr(resolved.engine, key) for key in _KEYS}
    digest.update(msgspec.json.encode([keys, resolved.max_model_len, *more]))
    return digest.hexdigest()[:32]


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(f"{size}\0".encode())
        if size <= WHOLE_BYTES:
            digest.update(file.read())
            return
        for number in range(NUM_SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
