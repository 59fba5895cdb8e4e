"""A mixture as grouped products, or in one call of our kernels, against one that is computed expert
by expert."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from engine.device.distributed import ParallelState
from engine.layers.adapted import AdaptedLinears, ExpertProjection, NativeAdapters, TorchAdapters
from engine.layers.expert_counts import ExpertCounts
from engine.layers.expert_share import ExpertShare
from engine.layers.experts import Experts, Mixture, set_kernels
from engine.layers.grouped_experts import GroupedExperts
from engine.layers.linear_kernel import GroupedKernel, NativeKernel
from engine.layers.slotted_adapters import SlottedAdapters
from engine.layers.weight_format import NativeFormat, PlainFormat, QuantizedFormat
from engine.models.cuts import take_ranges
from engine.models.mixture_cuts import mixture_cut
from engine.native.compiler import ISA_FLAGS
from tests.support.kernels import instruction_set, load_kernels, torch_threads

ALL = ExpertShare(range(6), 6, ParallelState.single())
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 6}
KINDS: dict[str, tuple[Any, Any]] = {
    "gated": (MixtralExperts, MixtralConfig(**SIZES)),
    "biased and transposed": (GptOssExperts, GptOssConfig(**SIZES)),
    "without gate": (
        NemotronHExperts,
        NemotronHConfig(hidden_size=32, moe_intermediate_size=48, n_routed_experts=6),
    ),
}


def make(kind: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    make_module, config = KINDS[kind]
    module = make_module(config)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.2
    return module.to(dtype)


def share(kind: str, rank: int) -> tuple[Any, ExpertShare]:
    """One of two ranks' experts; nothing is added up."""
    return some(kind, [3 * rank, 3 * rank + 1, 3 * rank + 2])


def scattered(kind: str, rank: int) -> tuple[Any, ExpertShare]:
    """The same for experts that don't follow one another."""
    return some(kind, [[0, 2, 5], [1, 3, 4]][rank])


def some(kind: str, experts: list[int]) -> tuple[Any, ExpertShare]:
    module = make(kind, torch.float32)
    for name, value in [*module.named_parameters()]:
        setattr(module, name, torch.nn.Parameter(value.data[experts], requires_grad=False))
    others: Any = SimpleNamespace(tp_size=2, all_reduce=lambda x: x)
    return module, ExpertShare(experts, 6, others)


def routes(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    chosen = (
        torch.tensor([torch.randperm(6)[:2].tolist() for _ in range(tokens)]).view(-1, 2).long()
    )
    chosen[chosen == 4] = 5  # an expert without tokens
    return torch.randn(tokens, 32).to(dtype), chosen, torch.rand(tokens, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters(kind: str) -> None:
    """Each way to compute a mixture has adapters, and a token's result is the same in any batch."""
    hidden, chosen, weights = routes(7, torch.float32)
    slots = np.array([1, -1, 0, 1, 2, -1, 1], np.int32)
    gated = kind != "without gate"
    up, down = (
        ExpertProjection(name, out, size, dim, (range((out, size)[dim]),), "m", 6, tuple(range(6)))
        for name, out, size, dim in (("up", 96 if gated else 48, 32, 0), ("down", 32, 48, 1))
    )
    torch.manual_seed(4)
    own = {
        slot: {
            part.name: (torch.randn(6, 3, part.in_size), torch.randn(6, 3, part.out_size) * 0.3)
            for part in (up, down)[slot:]
        }
        for slot in (0, 1)
    }
    merged = []
    for slot in range(2):
        module = make(kind, torch.float32)
        for part in (up, down)[slot:]:
            name = "down_proj" if part is down else "gate_up_proj" if gated else "up_proj"
            a, b = own[slot][part.name]
            more = b.mT @ a
            getattr(module, name).data += more.mT if module.is_transposed else more
        merged.append(Experts(module, PlainFormat(), ALL))
    plain = Experts(make(kind, torch.float32), PlainFormat(), ALL)
    by_slot = {-1: plain, 0: merged[0], 1: merged[1], 2: plain}
    wanted = torch.cat(
        [
            by_slot[slot](hidden[row : row + 1], chosen[row : row + 1], weights[row : row + 1])
            for row, slot in enumerate(slots.tolist())
        ]
    )
    load_kernels()
    slotted = partial(SlottedAdapters, max_rank=4, like=hidden, by_triton=False)
    ways: list[tuple[Any, Any]] = [
        (Experts(make(kind, torch.float32), PlainFormat(), ALL), TorchAdapters),
        (Experts(make(kind, torch.float32), NativeFormat(), ALL), NativeAdapters),
        (GroupedExperts(make(kind, torch.float32), ALL), slotted),
    ]
    for mixture, adapters in ways:
        linears = AdaptedLinears(3, adapters)
        linears.adapt_experts(mixture, up, down)
        for slot, factors in own.items():
            linears.set(slot, factors)
        rows = linears.rows(slots, torch.device("cpu"))
        assert rows.changes_experts
        linears.step.begin(rows)
        found = mixture(hidden, chosen, weights)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
        for row in range(len(slots)):
            at = slice(row, row + 1)
            linears.step.begin(linears.rows(slots[at], torch.device("cpu")))
            alone = mixture(hidden[at], chosen[at], weights[at])
            assert torch.equal(alone, found[at]) or adapters is not NativeAdapters
        linears.step.begin(None)
        torch.testing.assert_close(mixture(hidden, chosen, weights), plain(hidden, chosen, weights))
        linears.set(0, {})
        linears.set(1, {})
        assert not linears.rows(slots, torch.device("cpu")).changes_experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_sum_of_the_experts(kind: str, dtype: torch.dtype) -> None:
    grouped = GroupedExperts(make(kind, dtype), ALL)
    apart = Experts(make(kind, dtype), PlainFormat(), ALL)
    for tokens in (1, 7, 64):
        given = routes(tokens, dtype)
        found, wanted = grouped(*given), apart(*given)
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
        assert torch.equal(found, grouped(*given))


@pytest.mark.parametrize("divide", [share, scattered])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_add_up_and_numbers_of_no_expert_add_nothing(kind: str, divide: Any) -> None:
    given = routes(20, torch.float32)
    given[1][3, 1], given[1][4, 1] = 6, -1
    wanted = GroupedExperts(make(kind, torch.float32), ALL)(*given)
    parts, apart = [], []
    for rank in (0, 1):
        module, mine = divide(kind, rank)
        apart.append(Experts(copy.deepcopy(module), PlainFormat(), mine)(*given))
        parts.append(GroupedExperts(module, mine)(*given))
    for found in (parts, apart):
        torch.testing.assert_close(found[0] + found[1], wanted, atol=1e-5, rtol=1e-5)
    hidden, chosen, weights = given
    chosen[:, 1] = 6
    alone = GroupedExperts(make(kind, torch.float32), ALL)
    found = alone(hidden, chosen, weights)
    torch.testing.assert_close(found, alone(hidden, chosen[:, :1], weights[:, :1]))


def part_of_each(kind: str, rank: int) -> tuple[Any, ExpertShare]:
    """One of two ranks' parts of all experts; nothing is added up."""
    cut = mixture_cut("m", make(kind, torch.float32))
    assert cut is not None and cut.inner == 48
    module = make(kind, torch.float32)
    for one in cut.cuts:
        name = one.name.removeprefix("m.")
        taken = take_ranges(getattr(module, name).data, one.dim, one.ranges(2, rank))
        setattr(module, name, torch.nn.Parameter(taken, requires_grad=False))
    if rank and kind == "biased and transposed":
        assert cut.whole == {"m.down_proj_bias": 6 * 32}
        torch.nn.init.zeros_(module.down_proj_bias)
    others: Any = SimpleNamespace(tp_size=2, all_reduce=lambda x: x)
    return module, ExpertShare(range(6), 6, others)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_experts_add_up(kind: str) -> None:
    """Gates and ups of GPT-OSS stand in turns."""
    given = routes(20, torch.float32)
    given[1][3, 1] = 6
    wanted = Experts(make(kind, torch.float32), PlainFormat(), ALL)(*given)
    halves = [part_of_each(kind, rank) for rank in (0, 1)]
    grouped = [GroupedExperts(*half)(*given) for half in halves]
    apart = [Experts(module, PlainFormat(), mine)(*given) for module, mine in halves]
    for parts in (grouped, apart):
        torch.testing.assert_close(parts[0] + parts[1], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_one_call_is_the_same_sum(dtype: torch.dtype, threads: int) -> None:
    load_kernels()
    fused = Experts(make("gated", dtype), NativeFormat(), ALL)
    apart = Experts(make("gated", dtype), PlainFormat(), ALL)
    assert fused.weights is not None and apart.weights is None
    with torch_threads(threads):
        for tokens in (0, 1, 7, 64):
            hidden, chosen, weights = routes(tokens, dtype)
            chosen[tokens // 2 :, 1] = 6  # no expert's number
            tolerance = 1e-5 if dtype == torch.float32 else 3e-2
            found = fused(hidden, chosen, weights)
            wanted = apart(hidden, chosen, weights)
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
            alone = [
                fused(hidden[i : i + 1], chosen[i : i + 1], weights[i : i + 1])
                for i in range(tokens)
            ]
            assert all(torch.equal(row, found[i : i + 1]) for i, row in enumerate(alone))


@pytest.fixture(params=tuple(ISA_FLAGS))
def every_isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with instruction_set(request.param):
        yield


@pytest.mark.usefixtures("every_isa")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_experts_are_one_call(dtype: torch.dtype, bits: int) -> None:
    """Their sums are those of experts by themselves, whatever else is in the batch."""
    module, form = make("gated", dtype), QuantizedFormat(bits)
    fused, apart = (Experts(copy.deepcopy(module), form, ALL) for _ in range(2))
    assert all(type(kernel) is GroupedKernel for kernel in (*fused._up, *fused._down))
    assert fused.weights is not None
    apart.weights = None
    for tokens in (0, 1, 7, 600):  # more than a block of an expert
        hidden, chosen, weights = routes(tokens, dtype)
        chosen[tokens // 2 :, 1] = 6  # no expert's number
        found, wanted = fused(hidden, chosen, weights), apart(hidden, chosen, weights)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
        for threads in (1, 2):
            with torch_threads(threads):
                again = fused(hidden[: tokens // 2], chosen[: tokens // 2], weights[: tokens // 2])
            assert torch.equal(again, found[: tokens // 2])
        mixture = Mixture(torch.randn(6, 32).to(dtype), 2, True, fused)
        assert mixture.forward(hidden).shape == hidden.shape


def test_quantized_and_plain_experts_are_multiplied_apart() -> None:
    """As where a rank's part of what is behind the gates cuts through groups."""
    load_kernels()
    module = make("gated", torch.float32)
    wanted = Experts(copy.deepcopy(module), QuantizedFormat(8), ALL)
    form = QuantizedFormat(8)
    set_kernels(module, "gate_up_proj", [form.linear(w, None) for w in module.gate_up_proj.data])
    mixed = Experts(module, NativeFormat(), ALL)
    assert mixed.weights is None and type(mixed._down[0]) is NativeKernel
    given = routes(9, torch.float32)
    torch.testing.assert_close(mixed(*given), wanted(*given), atol=0.05, rtol=0.05)


def test_the_kernel_refuses_quantized_experts_that_do_not_fit() -> None:
    kernels = load_kernels()

    def matrix(out: int, inputs: int) -> list[Any]:
        kernel = QuantizedFormat(8).linear(torch.ones(out, inputs), None)
        assert isinstance(kernel, GroupedKernel)
        return kernel.weights

    ups, downs = [matrix(64, 32)], [matrix(32, 32)]
    by = kernels.ExpertWeights(ups, downs, False)
    assert by.inner == 32
    chosen, weights = torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    assert kernels.experts(torch.ones(3, 32), chosen, weights, by).shape == (3, 32)
    with pytest.raises(RuntimeError, match=r"x must be \[rows, 32\]"):
        kernels.experts(torch.ones(3, 48), chosen, weights, by)
    with pytest.raises(RuntimeError, match="there are 1 ups and 2 downs"):
        kernels.ExpertWeights(ups, downs * 2, False)
    with pytest.raises(RuntimeError, match="experts have no matrices"):
        kernels.ExpertWeights([[]], downs, False)
    for wrong in ([matrix(32, 32)], [matrix(64, 32) * 2]):
        with pytest.raises(RuntimeError, match="expert 0 has other sizes"):
            kernels.ExpertWeights(wrong, downs, False)
    with pytest.raises(RuntimeError, match="expert 1 has other sizes"):
        kernels.ExpertWeights(ups * 2, [*downs, matrix(32, 48)], False)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_a_router_and_its_experts_are_one_call(top_k: int, normalized: bool) -> None:
    load_kernels()
    experts = Experts(make("gated", torch.float32), NativeFormat(), ALL)
    torch.manual_seed(4)
    router = torch.randn(6, 32)
    mixture = Mixture(router, top_k, normalized, experts)
    for tokens in (0, 1, 200):
        hidden = torch.randn(1, tokens, 32)
        weights, chosen = (hidden[0] @ router.t()).softmax(-1).topk(top_k)
        if normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        with torch_threads(2):
            found = mixture.forward(hidden)
        torch.testing.assert_close(found[0], experts(hidden[0], chosen, weights))
        alone = [mixture.forward(hidden[:, i : i + 1]) for i in range(tokens)]
        assert all(torch.equal(row[0, 0], found[0, i]) for i, row in enumerate(alone))


@pytest.mark.parametrize("divide", [share, scattered, part_of_each])
def test_a_rank_adds_its_own_experts_of_a_mixture(divide: Any) -> None:
    """The first of equal logits are chosen, so the ranks agree."""
    load_kernels()
    torch.manual_seed(5)
    router, hidden = torch.randn(6, 32), torch.randn(9, 32)
    router[3] = router[1]
    whole = Experts(make("gated", torch.float32), NativeFormat(), ALL)
    parts = []
    for rank in (0, 1):
        module, mine = divide("gated", rank)
        part = Experts(module, NativeFormat(), mine)
        parts.append(Mixture(router, 2, True, part).forward(hidden))
    wanted = Mixture(router, 2, True, whole).forward(hidden)
    torch.testing.assert_close(parts[0] + parts[1], wanted, atol=1e-5, rtol=1e-5)


def test_threads_divide_an_experts_inner_numbers() -> None:
    """Only where they are whole panels: 128 are with every instruction set."""
    kernels = load_kernels()
    torch.manual_seed(6)
    ups, downs = torch.randn(3, 256, 32) / 6, torch.randn(3, 32, 128) / 12
    by = kernels.ExpertWeights(
        [kernels.pack(up) for up in ups], [kernels.pack(down) for down in downs], 128
    )
    x, chosen, weights = torch.randn(2, 32), torch.tensor([[1], [2]]), torch.rand(2, 1)
    gate, up = torch.einsum("th,toh->to", x, ups[chosen[:, 0]]).chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * up
    wanted = torch.einsum("ti,toi->to", inner, downs[chosen[:, 0]]) * weights
    found = []
    for threads in (1, 2):
        with torch_threads(threads):
            found.append(kernels.experts(x, chosen, weights, by))
    torch.testing.assert_close(found[0], wanted)
    assert torch.equal(found[0], found[1])


def test_a_mixture_counts_the_tokens_of_all_experts() -> None:
    """Also of those that another rank has."""
    load_kernels()
    module, mine = scattered("gated", 1)
    experts = Experts(module, NativeFormat(), mine)
    torch.manual_seed(4)
    router, hidden = torch.randn(6, 32), torch.randn(200, 32)
    mixture = Mixture(router, 2, True, experts)
    before = mixture.forward(hidden)
    experts.counts = ExpertCounts(6, torch.device("cpu"))
    with torch_threads(2):
        assert torch.equal(mixture.forward(hidden), before)
    mixture.forward(hidden[:1])
    chosen = (hidden @ router.t()).topk(2).indices
    chosen = torch.cat([chosen, chosen[:1]])
    assert experts.counts.tokens() == torch.bincount(chosen.flatten(), minlength=6).tolist()
    apart = ExpertCounts(6, torch.device("cpu"))
    apart.add(chosen, None)
    assert apart.tokens() == experts.counts.tokens()


def test_tokens_of_no_expert_and_those_that_fill_up_are_not_counted() -> None:
    counts = ExpertCounts(3, torch.device("cpu"))
    chosen = torch.tensor([[0, 2], [1, 3], [2, 9], [-1, 2]])
    counts.add(chosen, None)
    assert counts.tokens() == [1, 1, 3]
    counts.add(chosen, torch.tensor([True, False, False, True]))
    assert counts.tokens() == [2, 1, 5]
    counts.reset()
    assert counts.tokens() == [0, 0, 0]


@pytest.mark.parametrize("normalized", [True, False])
def test_a_logit_that_is_nan_shows(normalized: bool) -> None:
    load_kernels()
    experts = Experts(make("gated", torch.float32), NativeFormat(), ALL)
    router = torch.randn(6, 32)
    router[5] = torch.nan
    assert Mixture(router, 2, normalized, experts).forward(torch.randn(3, 32)).isnan().all()


def test_experts_apart_are_no_mixture() -> None:
    apart = Experts(make("gated", torch.float32), PlainFormat(), ALL)
    with pytest.raises(ValueError, match="one by one"):
        Mixture(torch.randn(6, 32), 2, True, apart)


def test_other_gates_and_biases_are_not_fused() -> None:
    load_kernels()
    gelu = make("gated", torch.float32)
    gelu.act_fn = torch.nn.GELU()
    others = [make(kind, torch.float32) for kind in ("biased and transposed", "without gate")]
    for module in (*others, gelu):
        assert Experts(module, NativeFormat(), ALL).weights is None


def test_the_kernel_refuses_what_does_not_fit() -> None:
    kernels = load_kernels()
    x, chosen, weights = torch.ones(3, 8), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    ups, downs = [kernels.pack(torch.ones(12, 8))], [kernels.pack(torch.ones(8, 6))]
    by = kernels.ExpertWeights(ups, downs, 6)
    assert kernels.experts(x, chosen, weights, by).shape == (3, 8)
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((x[0], chosen, weights, by), r"x must be \[rows, 8\]"),
        ((x, chosen.int(), weights, by), "chosen must be int64"),
        ((x, chosen[:2], weights, by), "chosen must be int64"),
        ((x, chosen, weights.double(), by), "weights must be float32"),
        ((x.half(), chosen, weights, by), "another type"),
        ((x.to("meta"), chosen, weights, by), "CPU"),
    ]
    for arguments, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            kernels.experts(*arguments)
    matrices: list[tuple[tuple[Any, ...], str]] = [
        ((ups, [], 6), "1 ups and 0 downs"),
        (([], [], 6), "0 ups and 0 downs"),
        ((ups, downs, 500), "not packed for 1000 outputs"),
        ((ups, ups, 6), "other sizes"),
        ((ups, [kernels.pack(torch.ones(8, 6).half())], 6), "another type"),
    ]
    for arguments, message in matrices:
        with pytest.raises(RuntimeError, match=message):
            kernels.ExpertWeights(*arguments)
    router = kernels.pack(torch.ones(4, 8))
    places = torch.tensor([0, 1, -1, 9])
    assert kernels.mixture(x, router, 4, 2, True, places, None, by).shape == (3, 8)
    for top_k in (0, 5):
        with pytest.raises(RuntimeError, match=f"there are 4 routes, not {top_k}"):
            kernels.mixture(x, router, 4, top_k, True, places, None, by)
    for other in (places[:3], places.float()):
        with pytest.raises(RuntimeError, match="places must be int64"):
            kernels.mixture(x, router, 4, 2, True, other, None, by)
    for counts in (torch.zeros(3, dtype=torch.int64), torch.zeros(4)):
        with pytest.raises(RuntimeError, match="counts must be int64"):
            kernels.mixture(x, router, 4, 2, True, places, counts, by)
