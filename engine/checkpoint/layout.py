"""`ModelLayout`: what a decoder of transformers consists of, as plain data.

It is recorded, not read: `engine.models.recording` runs the model once on torch's `meta` device and
notes each attention call. That loads torch and transformers, so another process does it, and the
result is kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import ConfigError
from engine.process.folders import cache_folder
from engine.process.other_process import ask_module

RECORD_TIMEOUT_S = 300.0
_RECORDING = "engine.models.recording"


class HeadSizes(msgspec.Struct, frozen=True):
    """Of the keys and values of a token."""

    num_kv_heads: int
    k_dim: int
    v_dim: int


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
    layer: int = 0
    """The decoder layer that makes it."""
    is_divided: bool = False
    """Whether tensor parallel ranks divide its heads; otherwise each computes all of them."""
    is_gathered: bool = False
    """Whether the model's own code attends, over gathered keys and values. Query heads, scale and
    masks are then its own business."""
    latent_of: HeadSizes | None = None
    """The keys and values that the model's code makes of this call's, which are latents (MLA): one
    head whose values are the first `v_dim` numbers of its keys. None: these are the model's own."""

    def on_rank(self, tp_size: int, first: int = 0) -> AttentionCall:
        """The call with one rank's heads, in a stage whose first call is number `first`."""
        kv_of = None if self.kv_of is None else self.kv_of - first
        if not self.is_divided:
            return msgspec.structs.replace(self, kv_of=kv_of)
        return msgspec.structs.replace(
            self,
            num_heads=self.num_heads // tp_size,
            num_kv_heads=max(1, self.num_kv_heads // tp_size),
            kv_of=kv_of,
            latent_of=self.latent_of
            and msgspec.structs.replace(
                self.latent_of, num_kv_heads=max(1, self.latent_of.num_kv_heads // tp_size)
            ),
        )

    @property
    def expanded(self) -> AttentionCall:
        """The call with the keys and values that its latents stand for; otherwise itself."""
        if self.latent_of is None:
            return self
        sizes = msgspec.structs.asdict(self.latent_of)
        return msgspec.structs.replace(self, latent_of=None, **sizes)

    def check_ranks(self, tp_size: int) -> None:
        """Raise `ConfigError` unless its heads can be divided over `tp_size` ranks."""
        if self.num_heads % tp_size:
            raise ConfigError(
                f"tp_size ({tp_size}) must divide the model's {self.num_heads} attention heads."
            )
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise ConfigError(
                f"tp_size ({tp_size}) must divide the model's {self.num_kv_heads} key/value heads, "
                "or be a multiple of them."
            )

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
            "attention of the model's own code": self.is_gathered,
            "latents, of which values are a part of the keys": self.latent_of is not None,
        }
        return tuple(name for name, asked in found.items() if asked)

    @property
    def kv_size(self) -> int:
        """Numbers that a token takes in the KV cache."""
        if self.kv_of is not None:
            return 0
        values = self.v_dim if self.latent_of is None else 0
        return self.num_kv_heads * (self.k_dim + values)

    @property
    def reach(self) -> int | None:
        """Tokens that a query sees at most, its own included; None: all."""
        return min(filter(None, (self.window, self.chunk)), default=None)

    def first_key(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position + 1 - self.window)


def beyond_plain(calls: Sequence[AttentionCall]) -> tuple[str, ...]:
    """What `calls` have beyond scales and windows, in words; () if nothing."""
    found = sorted({feature for call in calls for feature in call.features})
    if len({(call.num_heads, call.num_kv_heads, call.k_dim) for call in calls}) > 1:
        found.append("heads of different sizes or numbers between layers")
    return tuple(found)


def sees_windows(calls: Sequence[AttentionCall]) -> tuple[bool, ...]:
    """Of each of a model's or a stage's `calls`: whether its keys and values are read within
    windows alone, by all calls that share them."""
    sources = [number if call.kv_of is None else call.kv_of for number, call in enumerate(calls)]
    whole = {source for source, call in zip(sources, calls, strict=True) if call.reach is None}
    return tuple(source not in whole for source in sources)


def rank_calls(
    calls: Sequence[AttentionCall], tp_size: int, layers: range
) -> tuple[AttentionCall, ...]:
    """Those of a model's `calls` that a pipeline stage with these decoder layers makes, with the
    heads of one tensor parallel rank."""
    found = [call for call in calls if call.layer in layers]
    first = calls.index(found[0]) if found else 0
    return tuple(call.on_rank(tp_size, first) for call in found)


def layer_of(module: str, layers: str) -> int:
    """The decoder layer that a module is in, where the list of them is the module `layers`; 0 if
    there is no list."""
    if not layers or not module.startswith(f"{layers}."):
        return 0
    return int(module.removeprefix(f"{layers}.").split(".")[0])


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


class Part(msgspec.Struct, frozen=True):
    """A piece of a parameter, of which each of several ranks has an equal share."""

    size: int
    units: int
    """Pieces of it that stay whole, such as heads."""
    is_shared: bool = False
    """Whether several ranks may have the same unit: with more ranks than key/value heads."""

    def divides(self, tp_size: int) -> bool:
        """Whether `tp_size` ranks can have shares of it."""
        return self.units % tp_size == 0 or (self.is_shared and tp_size % self.units == 0)

    def share(self, tp_size: int, tp_rank: int) -> range:
        """The numbers of it that a rank has."""
        count = max(1, self.units // tp_size)
        first = tp_rank * self.units // tp_size
        unit = self.size // self.units
        return range(first * unit, (first + count) * unit)


class Cut(msgspec.Struct, frozen=True):
    """How tensor parallel ranks divide a parameter: along `dim`, each of its `parts`."""

    name: str
    dim: int
    parts: tuple[Part, ...]
    numel: int
    """Numbers of the whole parameter."""

    def ranges(self, tp_size: int, tp_rank: int) -> list[range]:
        """What a rank has along `dim`."""
        found, start = [], 0
        for part in self.parts:
            share = part.share(tp_size, tp_rank)
            found.append(range(start + share.start, start + share.stop))
            start += part.size
        return found

    def local_numel(self, tp_size: int) -> int:
        """Numbers that each rank has."""
        size = sum(part.size for part in self.parts)
        return self.numel // size * sum(map(len, self.ranges(tp_size, 0)))


class MixtureCut(msgspec.Struct, frozen=True):
    """How tensor parallel ranks divide a mixture. They form `ep_size` groups of equally many: a
    group has some of the experts, and each of its ranks a part of these experts' inner numbers."""

    name: str
    """Of the module."""
    num_experts: int
    inner: int
    """Inner numbers of an expert; 0 if they can't be divided."""
    cuts: tuple[Cut, ...]
    """Of parameters [experts, ...], along the inner numbers."""
    whole: dict[str, int]
    """Name and numbers of parameters [experts, ...] that have no inner numbers, such as what is
    added to an expert's result: the first rank of a group adds them, its others zeros. All
    parameters if the inner numbers can't be divided."""
    order: tuple[int, ...] = ()
    """The experts, those of the first group first; () stands for their own order."""

    def experts(self, group: int, ep_size: int) -> list[int]:
        """Those of one of `ep_size` groups, ascending."""
        count = self.num_experts // ep_size
        order = self.order or range(self.num_experts)
        return sorted(order[group * count : (group + 1) * count])

    def divides(self, tp_size: int, ep_size: int) -> bool:
        """Whether `tp_size` ranks in `ep_size` groups can have shares of it."""
        ranks = tp_size // ep_size
        is_inner_fit = ranks == 1 or (self.inner > 0 and self.inner % ranks == 0)
        return self.num_experts % ep_size == 0 and is_inner_fit

    def saved(self, tp_size: int, ep_size: int) -> int:
        """Numbers of it that a rank doesn't have."""
        ranks = tp_size // ep_size
        local = sum(cut.local_numel(ranks) for cut in self.cuts) + sum(self.whole.values())
        return sum(cut.numel for cut in self.cuts) + sum(self.whole.values()) - local // ep_size


class ModelLayout(msgspec.Struct, frozen=True):
    """A model that `engine.models.transformers_model` runs."""

    class_name: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    calls: tuple[AttentionCall, ...]
    read: tuple[str, ...]
    """Linears whose weights the code around them reads."""
    states: tuple[StateSpec, ...]
    layers: str
    """Name of the list of its decoder layers; "" if there is none."""
    layer_parameters: tuple[int, ...]
    """Numbers of each layer, before it is divided."""
    embeddings: tuple[str, ...]
    """Names of the embeddings before the layers, which only the first stage has."""
    embedding_parameters: int
    """Their numbers."""
    head: str
    """Name of the output head, if it is a linear; "" otherwise."""
    head_parameters: int
    """Its numbers, which only the last stage has."""
    is_tied: bool
    """Whether the head is the embedding's matrix."""
    other_parameters: int
    """Numbers outside the layers that every stage has."""
    cuts: tuple[Cut, ...]
    """Of the parameters that tensor parallel ranks divide, those of `mixtures` aside; each has all
    of the others."""
    mixtures: tuple[MixtureCut, ...]
    local_modules: tuple[str, ...] = ()
    """Modules whose numbers of heads must be those of the rank."""
    not_staged: str = ""
    """Why the layers can't be divided over pipeline stages; "" if they can."""
    layers_return_tuples: bool = False

    @property
    def mode(self) -> Literal["flat", "rows", "gathered"]:
        """How a step runs. flat: its tokens at once, whosever they are. rows: each prompt's tokens
        by themselves and the decodes as a batch, because layers keep states of requests. gathered:
        each request by itself, because the model's own code attends to its keys."""
        if any(call.is_gathered for call in self.calls):
            return "gathered"
        return "rows" if self.states else "flat"

    def state_bytes(self, item: int) -> int:
        """Bytes of one request's states, where the model's numbers have `item` bytes."""
        return sum(math.prod(spec.shape) * (4 if spec.is_float32 else item) for spec in self.states)

    @property
    def num_layers(self) -> int:
        return len(self.layer_parameters)

    @property
    def expanded(self) -> ModelLayout:
        """The same with the keys and values that latents stand for."""
        return msgspec.structs.replace(self, calls=tuple(call.expanded for call in self.calls))

    def rank_parameters(self, tp_size: int, layers: range, ep_size: int | None = None) -> int:
        """Numbers of a rank whose stage has these decoder layers; `ep_size` as in the
        configuration."""
        is_first, is_last = layers.start == 0, layers.stop == self.num_layers
        found = sum(self.layer_parameters[layer] for layer in layers) + self.other_parameters
        found += self.embedding_parameters * is_first
        if self.divides_head(tp_size):
            found += self.head_parameters // tp_size * is_last
        else:
            found += self.head_parameters * (is_last and not (self.is_tied and is_first))
        mine = tuple(f"{self.layers}.{layer}." for layer in layers)
        for cut in self.cuts:
            if cut.name.startswith(mine):
                found -= cut.numel - cut.local_numel(tp_size)
        groups = self.expert_groups(tp_size, ep_size)
        for mixture in self.mixtures:
            if mixture.name.startswith(mine):
                found -= mixture.saved(tp_size, groups)
        return found

    def expert_groups(self, tp_size: int, ep_size: int | None) -> int:
        """Groups of ranks that divide the experts: `ep_size`, or as many as can be if that is None.
        Raises `ConfigError` if the mixtures can't be divided so."""
        if ep_size is None:
            for groups in range(tp_size, 0, -1):
                if tp_size % groups == 0 and self._why_not_groups(tp_size, groups) == "":
                    return groups
            raise ConfigError(
                f"tp_size ({tp_size}) can't divide the mixtures of {self.class_name}: "
                f"{self._why_not_groups(tp_size, tp_size)}, and "
                f"{self._why_not_groups(tp_size, 1)}; change tp_size."
            )
        if not self.mixtures:
            raise ConfigError(
                f"ep_size divides the experts of a mixture, and {self.class_name} has none that "
                "can be divided; leave it out."
            )
        if tp_size % ep_size:
            raise ConfigError(f"ep_size ({ep_size}) must divide tp_size ({tp_size}).")
        if why := self._why_not_groups(tp_size, ep_size):
            raise ConfigError(
                f"ep_size ({ep_size}) can't be had with tp_size ({tp_size}): {why}; change one of "
                "them, or leave ep_size out."
            )
        return ep_size

    def _why_not_groups(self, tp_size: int, groups: int) -> str:
        """What keeps `tp_size` ranks in `groups` from dividing the mixtures; "" if nothing."""
        for mixture in self.mixtures:
            if mixture.divides(tp_size, groups):
                continue
            if mixture.num_experts % groups:
                return (
                    f"the {mixture.num_experts} experts of '{mixture.name}' aren't divided by "
                    f"{groups}"
                )
            ranks = tp_size // groups
            if mixture.inner == 0:
                return f"an expert of '{mixture.name}' can't be divided over {ranks} ranks"
            return (
                f"the {mixture.inner} inner numbers of an expert of '{mixture.name}' aren't "
                f"divided by {ranks}"
            )
        return ""

    def layer_of(self, module: str) -> int:
        """The decoder layer that a module is in; 0 if the model has no list of them."""
        return layer_of(module, self.layers)

    def divides_head(self, tp_size: int) -> bool:
        """Whether each of `tp_size` ranks has some outputs of the head; otherwise it has all."""
        return tp_size > 1 and self.head != "" and self.vocab_size % tp_size == 0

    def check_split(self, tp_size: int, stages: list[range], ep_size: int | None = None) -> None:
        """Raise `ConfigError` unless tensor parallel ranks, `ep_size` of which divide experts, and
        stages with these decoder layers can divide the model."""
        self.expert_groups(tp_size, ep_size)
        if tp_size > 1:
            self._check_ranks(tp_size)
        if len(stages) == 1:
            return
        if self.not_staged:
            raise ConfigError(
                f"{self.class_name} can't be divided into pipeline stages, because "
                f"{self.not_staged}; set pp_size: 1."
            )
        for layers in stages:
            if any((call.kv_of or 0) < 0 for call in rank_calls(self.calls, 1, layers)):
                raise ConfigError(
                    f"layer {layers.start} of {self.class_name} or one behind it reads the keys of "
                    f"an earlier one, which pp_size ({len(stages)}) puts on another stage; change "
                    "pp_size."
                )

    def _check_ranks(self, tp_size: int) -> None:
        if not self.cuts and not self.mixtures:
            raise ConfigError(
                f"nothing of {self.class_name} can be divided by tensor parallelism; set "
                "tp_size: 1."
            )
        for call in self.calls:
            if call.is_divided:
                call.check_ranks(tp_size)
        for cut in self.cuts:
            for part in cut.parts:
                if not part.divides(tp_size):
                    raise ConfigError(
                        f"tp_size ({tp_size}) must divide the {part.units} parts of '{cut.name}'."
                    )

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
