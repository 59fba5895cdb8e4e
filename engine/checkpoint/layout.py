"""`ModelLayout`: what a decoder of transformers consists of, as plain data.

It is recorded, not read: `engine.models.recording` runs the model once on torch's `meta` device and
notes each attention call. That loads torch and transformers, so another process does it, and the
result is kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from engine.process.folders import cache_folder
from engine.process.other_process import ask_module

RECORD_TIMEOUT_S = 300.0


class AttentionCall(msgspec.Struct, frozen=True):
    """What an attention call of a forward is; a layer of the model may make several. In a
    `ModelLayout` heads are those of the whole model, else those of a rank."""

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
    """The earlier call whose keys and values these are: nothing is stored for this one."""
    unknown: tuple[str, ...] = ()
    """What the model asks of attention besides."""

    @property
    def lacks(self) -> str:
        """What no attention backend can do yet; "" if all can serve the call."""
        found = {
            "query heads that key/value heads don't divide": self.num_heads % self.num_kv_heads > 0,
            ", ".join(self.unknown): bool(self.unknown),
        }
        return ", ".join(name for name, asked in found.items() if asked)

    @property
    def features(self) -> tuple[str, ...]:
        """What the call has beyond a scale and a window, in words."""
        found = {
            "keys and values of different sizes": self.k_dim != self.v_dim,
            "chunked attention": self.chunk is not None,
            "a soft cap of attention": self.softcap is not None,
            "attention sinks": self.has_sinks,
            "keys of another layer": self.kv_of is not None,
        }
        return tuple(name for name, asked in found.items() if asked)

    @property
    def kv_size(self) -> int:
        """Numbers that a token takes in the KV cache."""
        return 0 if self.kv_of is not None else self.num_kv_heads * (self.k_dim + self.v_dim)

    def first_key(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def on_rank(self, tp_size: int) -> AttentionCall:
        """The call with the heads of one of `tp_size` ranks; several may hold the same keys."""
        return msgspec.structs.replace(
            self,
            num_heads=self.num_heads // tp_size,
            num_kv_heads=max(1, self.num_kv_heads // tp_size),
        )


def beyond_plain(calls: Sequence[AttentionCall]) -> tuple[str, ...]:
    """What `calls` have beyond scales and windows, in words; () if nothing."""
    found = sorted({feature for call in calls for feature in call.features})
    if len({(call.num_heads, call.num_kv_heads, call.k_dim) for call in calls}) > 1:
        found.append("heads of different sizes or numbers between layers")
    return tuple(found)


class StateSpec(msgspec.Struct, frozen=True):
    """A state that a layer keeps of each request beside keys and values, in the layer's cache."""

    layer: int
    number: int
    """Among the layer's states of this kind."""
    kind: Literal["conv", "recurrent"]
    shape: tuple[int, ...]
    """Of one request."""
    is_float32: bool
    """Whatever the model's type is. False: it has that type."""


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
    read: tuple[str, ...]
    """Linears whose weights the code around them reads."""
    states: tuple[StateSpec, ...]

    @property
    def mode(self) -> Literal["flat", "rows"]:
        """How a step runs. flat: its tokens at once, whosever they are. rows: each prompt's tokens
        by themselves and the decodes as a batch, because layers keep states of requests."""
        return "rows" if self.states else "flat"

    def state_bytes(self, item: int) -> int:
        """Bytes of one request's states, where the model's numbers have `item` bytes."""
        return sum(math.prod(spec.shape) * (4 if spec.is_float32 else item) for spec in self.states)

    @property
    def lacks(self) -> str:
        """What keeps the model from being served; "" if nothing does."""
        if not self.calls and not self.states:
            return "attention through transformers' interface"
        return ", ".join(sorted({call.lacks for call in self.calls} - {""}))


def read_layout(folder: Path) -> ModelLayout:
    """The layout of a model folder: recorded before, or now. Raises `ConfigError` with the reason
    if transformers doesn't know the model or its forward can't be followed."""
    content = (folder / "config.json").read_bytes()
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


def _record(folder: Path) -> bytes:
    return ask_module(
        "engine.models.recording",
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
