"""`ModelLayout`: what a decoder of transformers consists of, as plain data.

It is recorded, not read: `engine.models.recording` runs the model once on torch's `meta` device and
notes each attention call. That loads torch and transformers, so another process does it, and the
result is kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from importlib import metadata
from pathlib import Path

import msgspec

from engine.process.folders import cache_folder
from engine.process.other_process import ask_module

RECORD_TIMEOUT_S = 300.0
_RECORDING = "engine.models.recording"


class AttentionCall(msgspec.Struct, frozen=True):
    """One attention call of a forward, in order; a layer may make several. Sizes of the whole
    model, before it is split."""

    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""
    chunk: int | None = None
    """Tokens see those of their own chunk of this size."""
    softcap: float | None = None
    has_sinks: bool = False
    kv_of: int | None = None
    """The earlier call whose keys and values these are."""
    unknown: tuple[str, ...] = ()
    """What the model asks of attention besides."""

    @property
    def lacks(self) -> str:
        """What no attention backend can do yet; "" if all can serve the call."""
        found = {
            "query heads that key/value heads don't divide": self.num_heads % self.num_kv_heads > 0,
            "keys and values of different sizes": self.k_dim != self.v_dim,
            "chunked attention": self.chunk is not None,
            "a soft cap of attention": self.softcap is not None,
            "attention sinks": self.has_sinks,
            "keys of another layer": self.kv_of is not None,
            ", ".join(self.unknown): bool(self.unknown),
        }
        return ", ".join(name for name, asked in found.items() if asked)


class ModelLayout(msgspec.Struct, frozen=True):
    """A model that `engine.models.transformers_model` runs."""

    class_name: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    calls: tuple[AttentionCall, ...]

    @property
    def lacks(self) -> str:
        """What keeps the model from being served; "" if nothing does."""
        if not self.calls:
            return "attention through transformers' interface"
        found = sorted({call.lacks for call in self.calls} - {""})
        shapes = {(call.num_heads, call.num_kv_heads, call.k_dim) for call in self.calls}
        if not found and len(shapes) > 1:
            return "heads of different sizes or numbers between layers"
        return ", ".join(found)


def read_layout(folder: Path) -> ModelLayout:
    """The layout of a model folder: recorded before, or now. Raises `ConfigError` with the reason
    if transformers doesn't know the model or its forward can't be followed."""
    content = (folder / "config.json").read_bytes()
    if _is_registered_here(json.loads(content).get("model_type")):
        layout: ModelLayout = importlib.import_module(_RECORDING).record(folder)
        return layout
    versions = f"{metadata.version('transformers')} {metadata.version('manta-serve')}"
    key = hashlib.sha256(versions.encode() + content).hexdigest()[:32]
    file = cache_folder() / "layouts" / f"{key}.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=ModelLayout)
    except (OSError, msgspec.DecodeError):
        recorded = _record(folder)
    layout = msgspec.json.decode(recorded, type=ModelLayout)
    _keep(file, recorded)
    return layout


def _is_registered_here(kind: object) -> bool:
    """Whether this process has registered the type with transformers: no other one knows it, and
    its code may change while config.json doesn't."""
    auto = sys.modules.get("transformers.models.auto.configuration_auto")
    return (
        auto is not None
        and isinstance(kind, str)
        and kind not in auto.CONFIG_MAPPING_NAMES
        and kind in auto.CONFIG_MAPPING
    )


def _record(folder: Path) -> bytes:
    return ask_module(
        _RECORDING,
        folder,
        RECORD_TIMEOUT_S,
        late=f"the model in {folder} takes too long to be looked through",
        failed=f"the model in {folder} can't be looked through",
        CUDA_VISIBLE_DEVICES="",
    )


def _keep(file: Path, content: bytes) -> None:
    """Write it for the next start; a folder that can't be written only costs time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(content)
        part.rename(file)
    except OSError:
        return
