"""Which matrices of an adapter's file belong to which projection of the model.

A linear's are a pair. PEFT has those of a mixture's experts in three forms: a pair for each linear
of each expert, as models had them before transformers 5; and for each parameter of the mixture one
pair for all experts, with inputs and outputs exchanged by PEFT before 0.18.1 where transformers
keeps a matrix as [out, in].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint.adapter import PeftAdapter
from engine.errors import ConfigError
from engine.layers.adapted import AdaptedLinears, ExpertProjection, Projection, check_sizes

Matrices = tuple[Tensor, Tensor]
"""Float32 A [rank, in] and B [out, rank], scaled."""
_EXPERT = re.compile(r"(?P<mixture>.+\.experts)\.(?P<number>\d{1,5})\.(?P<matrix>\w+)")
_GATES, _UPS, _DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


@dataclass(frozen=True)
class Source:
    """A pair of the file that is a projection's, or a part of it."""

    linear: str
    """As the file has it."""
    expert: int | None = None
    """Whose it is alone."""
    outputs: slice | None = None
    """Those of the projection that it has; None: all."""
    is_exchanged: bool = False
    """A [rank, out] and B [in, rank], of experts that are one parameter."""


def find_sources(
    adapter: PeftAdapter, linears: AdaptedLinears, is_elsewhere: Callable[[str], bool]
) -> dict[str, list[Source]]:
    """By projection of this rank, in the order of the file. `is_elsewhere` says whether another
    pipeline stage may have what is called so. Raises `ConfigError` if the adapter doesn't fit."""
    found: dict[str, list[Source]] = {}
    mixtures: dict[str, list[ExpertProjection]] = {}
    for part in linears.projections.values():
        if isinstance(part, ExpertProjection):
            mixtures.setdefault(part.mixture, []).append(part)
    for name, factors in adapter.linears.items():
        sizes = factors.in_size, factors.out_size
        mixture = name.removesuffix(".base_layer").removesuffix(".base_layer")
        of_one = _EXPERT.fullmatch(name)
        if name in linears.projections:
            _check_single(name, factors.num_experts)
            linears.check(name, *sizes)
            found[name] = [Source(name)]
        elif mixture in mixtures:
            part, source = _of_all(name, mixtures[mixture], *sizes, factors.num_experts)
            if part.name in found:
                raise ConfigError(f"it has matrices for '{part.name}' twice.")
            found[part.name] = [source]
        elif of_one is not None and (own := _same_layer(of_one["mixture"], mixtures)):
            _check_single(name, factors.num_experts)
            part, source = _of_one(name, own, int(of_one["number"]), of_one["matrix"], *sizes)
            beside = found.setdefault(part.name, [])
            if beside and beside[0].expert is None:
                raise ConfigError(f"it has matrices for '{part.name}' twice.")
            beside.append(source)
        elif not is_elsewhere(name):
            if not linears.takes_experts and ".experts" in name:
                raise ConfigError(
                    f"it changes the experts '{name}'. On a GPU their slots take memory, so that "
                    "an adapter which does must be among lora_adapters at the start."
                )
            linears.check(name, *sizes)
    for sources in found.values():
        rank = sum(_ranks(adapter, sources).values())
        if linears.max_rank is not None and rank > linears.max_rank:
            raise ConfigError(
                f"gate and up of an expert have rank {rank} together, and max_lora_rank is "
                f"{linears.max_rank}; raise it."
            )
    return found


def build(
    adapter: PeftAdapter,
    part: Projection,
    sources: list[Source],
    read: Callable[[str], Matrices],
) -> Matrices:
    """The matrices of a projection, whole: A [rank, in] and B [out, rank], of a mixture's parameter
    A [experts, rank, in] and B [experts, out, rank]."""
    if not isinstance(part, ExpertProjection):
        return read(sources[0].linear)
    count = part.num_experts
    if sources[0].expert is None:
        (a, b), source = read(sources[0].linear), sources[0]
        a = a.reshape(count, -1, a.shape[1])
        b = b.reshape(len(b), -1, count).permute(2, 0, 1)
        return (b.transpose(1, 2), a.transpose(1, 2)) if source.is_exchanged else (a, b)
    starts, rank = {}, 0
    for outputs, own in _ranks(adapter, sources).items():
        starts[outputs] = rank
        rank += own
    all_a = torch.zeros(count, rank, part.in_size)
    all_b = torch.zeros(count, part.out_size, rank)
    for source in sources:
        a, b = read(source.linear)
        ranks = slice(starts[_key(source)], starts[_key(source)] + len(a))
        all_a[source.expert, ranks] = a
        all_b[source.expert, source.outputs or slice(None), ranks] = b
    return all_a, all_b


def _check_single(name: str, num_experts: int) -> None:
    """Only a parameter of a mixture has matrices for several experts in one."""
    if num_experts != 1:
        raise ConfigError(f"'{name}' has matrices of {num_experts} times the rank that is stated.")


def _ranks(adapter: PeftAdapter, sources: list[Source]) -> dict[str, int]:
    """By outputs: the highest rank of the sources. Different outputs have inner numbers of their
    own."""
    found: dict[str, int] = {}
    for source in sources:
        own = adapter.linears[source.linear].rank
        found[_key(source)] = max(found.get(_key(source), 0), own)
    return found


def _key(source: Source) -> str:
    return str(source.outputs)


def _of_all(
    name: str, parts: list[ExpertProjection], in_size: int, out_size: int, num_experts: int
) -> tuple[ExpertProjection, Source]:
    """What a pair for all experts of a mixture is, by its sizes: PEFT names no parameter."""
    fits = [
        (part, Source(name, is_exchanged=exchanged))
        for exchanged in (False, True)
        for part in parts
        if (part.in_size, part.out_size)
        == ((out_size, in_size) if exchanged else (in_size, out_size))
    ]
    if num_experts != parts[0].num_experts or not fits:
        wanted = " or ".join(f"{part.in_size} and {part.out_size}" for part in parts)
        raise ConfigError(
            f"'{name}' has {parts[0].num_experts} experts with {wanted} inputs and outputs, and "
            f"the matrices of the adapter have {num_experts}, {in_size} and {out_size}."
        )
    if len({(part.name, source.is_exchanged) for part, source in fits}) > 1:
        raise ConfigError(
            f"'{name}' has parameters of the same sizes, so that an adapter's file doesn't say "
            "which of them it changes."
        )
    return fits[0]


def _of_one(
    name: str,
    parts: list[ExpertProjection],
    number: int,
    matrix: str,
    in_size: int,
    out_size: int,
) -> tuple[ExpertProjection, Source]:
    """What a pair for a matrix of one expert is."""
    up, down = parts
    if matrix in _DOWNS:
        part, outputs, wanted = down, None, down.out_size
    elif up.gate is None and matrix in _UPS:
        part, outputs, wanted = up, None, up.out_size
    elif up.gate is not None and matrix in (*_GATES, *_UPS):
        part, outputs, wanted = up, up.gate[matrix in _UPS], up.out_size // 2
    else:
        raise ConfigError(f"the model's experts have no matrix '{matrix}' ('{name}').")
    if number >= part.num_experts:
        raise ConfigError(f"the model has {part.num_experts} experts, and no '{name}'.")
    check_sizes(name, (part.in_size, wanted), (in_size, out_size))
    return part, Source(name, number, outputs)


def _same_layer(
    mixture: str, mixtures: Mapping[str, list[ExpertProjection]]
) -> list[ExpertProjection] | None:
    """The mixture of the same layer, whatever older versions called the modules between."""

    def layer(name: str) -> list[str]:
        words = name.split(".")
        ends: Iterator[int] = (at for at, word in enumerate(words) if word.isdecimal())
        return words[: next(ends, -1) + 1]

    wanted = layer(mixture)
    found = [parts for name, parts in mixtures.items() if layer(name) == wanted]
    return found[0] if wanted and len(found) == 1 else None
