"""Which matrices of an adapter's file a mixture's experts get: PEFT's three forms, and misfits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.checkpoint.adapter import Factors, PeftAdapter
from engine.errors import ConfigError
from engine.layers.adapted import (
    AdaptedLinears,
    ExpertAdapters,
    ExpertProjection,
    TorchAdapters,
)
from engine.worker.adapter_tensors import Matrices, build, find_sources

MIXTURE = "model.layers.1.mlp.experts"
HIDDEN, INNER, EXPERTS, RANK = 6, 4, 3, 2


class Owner:
    adapters: ExpertAdapters | None = None


def linears(
    in_turns: bool = False, hidden: int = HIDDEN, gated: bool = True, **keys: object
) -> AdaptedLinears:
    """A model of one mixture, whose rank has experts 0 and 2."""
    found = AdaptedLinears(2, TorchAdapters, **keys)  # type: ignore[arg-type]
    outputs = 2 * INNER if gated else INNER
    halves = (slice(0, INNER), slice(INNER, None))
    gate = (slice(0, None, 2), slice(1, None, 2)) if in_turns else halves
    mine = (MIXTURE, EXPERTS, (0, 2))
    up = ExpertProjection(
        f"{MIXTURE}.up", outputs, hidden, 0, (range(outputs),), *mine, gate if gated else None
    )
    down = ExpertProjection(f"{MIXTURE}.down", hidden, INNER, 1, (range(INNER),), *mine)
    found.adapt_experts(Owner(), up, down)
    return found


def adapter(tmp_path: Path, **pairs: Factors) -> PeftAdapter:
    names = {name.replace("__", "."): factors for name, factors in pairs.items()}
    return PeftAdapter(tmp_path, "", {f"model.layers.{n}": f for n, f in names.items()})


def one(in_size: int, out_size: int, rank: int = RANK) -> Factors:
    return Factors(rank, in_size, out_size, 1.0)


def every(in_size: int, out_size: int, count: int = EXPERTS) -> Factors:
    return Factors(RANK, in_size, out_size, 1.0, count)


def reader(found: PeftAdapter) -> tuple[dict[str, Matrices], Callable[[str], Matrices]]:
    torch.manual_seed(1)
    made = {}
    for name, f in found.linears.items():
        ranks = f.rank * f.num_experts
        made[name] = torch.randn(ranks, f.in_size), torch.randn(f.out_size, ranks)
    return made, made.__getitem__


def nowhere(name: str) -> bool:
    return False


@pytest.mark.parametrize("in_turns", [False, True])
def test_pairs_of_single_experts(tmp_path: Path, in_turns: bool) -> None:
    """They have the names of models before transformers 5; ranks may differ."""
    given = adapter(
        tmp_path,
        **{
            "1__block_sparse_moe__experts__2__w1": one(HIDDEN, INNER),
            "1__block_sparse_moe__experts__0__w3": one(HIDDEN, INNER, 3),
            "1__block_sparse_moe__experts__2__w3": one(HIDDEN, INNER),
        },
    )
    model = linears(in_turns)
    sources = find_sources(given, model, nowhere)
    assert [*sources] == [f"{MIXTURE}.up"]
    made, read = reader(given)
    part = model.projections[f"{MIXTURE}.up"]
    a, b = build(given, part, sources[part.name], read)
    assert a.shape == (EXPERTS, 5, HIDDEN)
    wanted = torch.zeros(EXPERTS, 2 * INNER, HIDDEN)
    gate, up = (slice(0, None, 2), slice(1, None, 2)) if in_turns else (slice(4), slice(4, None))
    for name, (x, y) in made.items():
        wanted[int(name.split(".")[-2]), gate if name.endswith("w1") else up] = y @ x
    torch.testing.assert_close(b @ a, wanted)
    own_a, own_b = part.own(a, b)
    torch.testing.assert_close(own_b @ own_a, wanted[[0, 2]])


@pytest.mark.parametrize("exchanged", [False, True])
def test_pairs_of_all_experts(tmp_path: Path, exchanged: bool) -> None:
    """`ParamWrapper.get_delta_weight` of PEFT, as it is and as it was before 0.18.1."""
    up, down = (HIDDEN, 2 * INNER), (INNER, HIDDEN)
    given = adapter(
        tmp_path,
        **{
            "1__mlp__experts": every(*(down[::-1] if exchanged else down)),
            "1__mlp__experts__base_layer": every(*(up[::-1] if exchanged else up)),
        },
    )
    model = linears()
    sources = find_sources(given, model, nowhere)
    made, read = reader(given)
    names = {f"{MIXTURE}.down": MIXTURE, f"{MIXTURE}.up": f"{MIXTURE}.base_layer"}
    for name, part in model.projections.items():
        a, b = build(given, part, sources[name], read)
        weight_a, weight_b = made[names[name]]
        weight_a = weight_a.reshape(EXPERTS, RANK, -1)
        weight_b = weight_b.reshape(-1, RANK, EXPERTS)
        form = "ore,eri->eio" if exchanged else "ore,eri->eoi"
        torch.testing.assert_close(b @ a, torch.einsum(form, weight_b, weight_a))


UP = one(HIDDEN, INNER)
MISFITS: dict[str, tuple[dict[str, Factors], str]] = {
    "number": ({"1__mlp__experts__3__gate_proj": UP}, "has 3 experts, and no"),
    "matrix": ({"1__mlp__experts__0__w4": UP}, "no matrix 'w4'"),
    "size": ({"1__mlp__experts__0__up_proj": one(HIDDEN, 5)}, "6 inputs and 4 outputs"),
    "sizes of all": ({"1__mlp__experts": every(HIDDEN, 5)}, "6 and 8 or 4 and 6"),
    "count": ({"1__mlp__experts": every(HIDDEN, 2 * INNER, 4)}, "have 4, 6 and 8"),
    "twice": (
        {
            "1__mlp__experts": every(HIDDEN, 2 * INNER),
            "1__mlp__experts__base_layer": every(HIDDEN, 2 * INNER),
        },
        "twice",
    ),
    "both forms": (
        {
            "1__mlp__experts__0__up_proj": UP,
            "1__mlp__experts": every(HIDDEN, 2 * INNER),
        },
        "twice",
    ),
    "rank of one": ({"1__mlp__experts__0__up_proj": every(HIDDEN, INNER, 2)}, "2 times the rank"),
    "layer": ({"2__mlp__experts__0__up_proj": UP}, "no linear"),
    "other linear": ({"1__mlp__gate": UP}, "no linear"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_misfits(tmp_path: Path, kind: str) -> None:
    pairs, says = MISFITS[kind]
    with pytest.raises(ConfigError, match=says):
        find_sources(adapter(tmp_path, **pairs), linears(), nowhere)
    turned = dict(reversed(pairs.items()))
    with pytest.raises(ConfigError, match=says):
        find_sources(adapter(tmp_path, **turned), linears(), nowhere)


def test_what_sizes_do_not_tell(tmp_path: Path) -> None:
    given = adapter(tmp_path, **{"1__mlp__experts": every(INNER, INNER)})
    with pytest.raises(ConfigError, match="doesn't say which"):
        find_sources(given, linears(hidden=INNER, gated=False), nowhere)


def test_another_stage_has_it(tmp_path: Path) -> None:
    given = adapter(
        tmp_path,
        **{"7__mlp__experts__0__up_proj": UP, "1__mlp__experts__0__up_proj": UP},
    )
    found = find_sources(given, linears(), lambda name: ".7." in name)
    assert [*found] == [f"{MIXTURE}.up"]


def test_slots_of_a_gpu(tmp_path: Path) -> None:
    """They have room for a rank; experts have slots only if a listed adapter needs them."""
    given = adapter(
        tmp_path,
        **{
            "1__mlp__experts__0__up_proj": UP,
            "1__mlp__experts__1__gate_proj": UP,
        },
    )
    with pytest.raises(ConfigError, match="rank 4 together, and max_lora_rank is 3"):
        find_sources(given, linears(max_rank=3), nowhere)
    assert find_sources(given, linears(max_rank=4), nowhere)
    with pytest.raises(ConfigError, match="among lora_adapters at the start"):
        find_sources(given, AdaptedLinears(2, TorchAdapters, takes_experts=False), nowhere)
