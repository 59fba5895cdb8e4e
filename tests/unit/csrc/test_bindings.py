"""What doesn't fit raises an error that says what does; nothing is read or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels import same_bits

Change = Callable[[Any], Any]
HALF = torch.bfloat16
F8 = torch.float8_e4m3fn


def arguments(kernels: Any, binding: str) -> dict[str, Any]:
    """Arguments that fit, in their order."""
    weight, x, bias = torch.ones(20, 8), torch.ones(3, 8), torch.ones(20)
    heads = {"q": torch.ones(3, 4, 8), "k": torch.ones(3, 2, 8), "v": torch.ones(3, 2, 8)}
    pool, ints = torch.zeros(32, 2, 8), torch.tensor
    numbers, scales = torch.ones(20, 64, dtype=torch.uint8), torch.ones(20, 2)
    grouped = kernels.GroupedWeight(numbers, 4, 8, 32, scales, None, None, None)
    by_binding: dict[str, dict[str, Any]] = {
        "use": {"name": kernels.isa()},
        "pack": {"weight": weight},
        "GroupedWeight": dict(
            numbers=numbers,
            bits=4,
            center=8,
            group=32,
            scales=scales,
            scale_codes=None,
            mins=scales.clone(),
            min_codes=None,
        ),
        "linear_grouped": dict(
            x=torch.ones(3, 64), weights=[grouped], bias=bias, short_inputs=False, as_float=False
        ),
        "linear": dict(x=x, packed=kernels.pack(weight), bias=bias, out=20, as_float=False),
        "unpack_rows": dict(packed=kernels.pack(weight), ids=ints([19, 0, 7]), out=20),
        "attention": dict(
            **heads,
            k_pool=pool,
            v_pool=pool.clone(),
            slots=ints([4, 5, 6]),
            table=torch.arange(4, 20, dtype=torch.int32).view(2, 8),
            requests=ints([0]),
            starts=ints([0, 3]),
            lengths=ints([3]),
            scale=1.0,
            window=0,
            chunk=0,
            softcap=0.0,
            sinks=None,
        ),
        "rms_norm": dict(x=x, weight=torch.ones(8), eps=1e-5),
        "add_rms_norm_": dict(x=x, residual=x.clone(), weight=torch.ones(8), eps=1e-5),
        "rotate_": dict(
            positions=ints([0, 1, 2]), q=heads["q"], k=heads["k"], cos_sin=torch.ones(5, 8)
        ),
        "silu_and_mul": dict(gate_up=x),
    }
    return by_binding[binding]


def to(dtype: torch.dtype) -> Change:
    return lambda x: x.to(dtype)


def shape(*sizes: int) -> Change:
    return lambda x: x.new_zeros(sizes)


def gaps(x: Tensor) -> Tensor:
    """The same numbers, with gaps in the last dimension."""
    return torch.stack((x, x), -1)[..., 0]


def row_gaps(x: Tensor) -> Tensor:
    """The same numbers, with gaps between rows."""
    return torch.cat((x, x), -1)[..., : x.shape[-1]]


def value(new: Any) -> Change:
    return lambda _: new


def numbers(*new: int) -> Change:
    return lambda _: torch.tensor(new)


def elsewhere(x: Tensor) -> Tensor:
    return x.to("meta")


WRONG: list[tuple[str, str, Change, str]] = [
    ("use", "name", value("sse"), "'sse' is not available"),
    ("pack", "weight", shape(20), r"\[out, in\]"),
    ("pack", "weight", shape(2, 20, 8), r"\[out, in\]"),
    ("pack", "weight", gaps, "contiguous"),
    ("pack", "weight", to(torch.float64), "no kernel for Double"),
    ("pack", "weight", to(torch.int8), "no kernel for Char"),
    ("pack", "weight", to(F8), "no kernel for Float8_e4m3fn"),
    ("pack", "weight", lambda w: w[:, :7].to(HALF).contiguous(), "must be even"),
    ("pack", "weight", elsewhere, "CPU"),
    ("GroupedWeight", "numbers", shape(20), r"uint8 \[out, in\]"),
    ("GroupedWeight", "numbers", to(torch.int8), r"uint8 \[out, in\]"),
    ("GroupedWeight", "numbers", gaps, "contiguous"),
    ("GroupedWeight", "numbers", elsewhere, "CPU"),
    ("GroupedWeight", "bits", value(3), "no numbers of 3 bits"),
    ("GroupedWeight", "center", value(256), "the center is 256"),
    ("GroupedWeight", "group", value(0), "don't divide 64 inputs"),
    ("GroupedWeight", "group", value(48), "don't divide 64 inputs"),
    ("GroupedWeight", "group", value(64), "doesn't go with groups of 64"),
    ("GroupedWeight", "scales", shape(20, 3), r"\[out, in / whole\]"),
    ("GroupedWeight", "scales", shape(19, 2), r"\[out, in / whole\]"),
    ("GroupedWeight", "scales", to(torch.float64), "mins must be as scales"),
    ("GroupedWeight", "scales", elsewhere, "CPU"),
    ("GroupedWeight", "mins", shape(20, 1), "mins must be as scales"),
    ("GroupedWeight", "mins", to(HALF), "mins must be as scales"),
    ("GroupedWeight", "mins", elsewhere, "CPU"),
    ("GroupedWeight", "scale_codes", value(torch.ones(20, 2, dtype=torch.int8)), "mins must be"),
    ("GroupedWeight", "min_codes", value(torch.ones(20, 2, dtype=torch.int8)), "mins must be"),
    ("linear_grouped", "weights", value([]), "there is no matrix"),
    ("linear_grouped", "x", shape(64), r"\[rows, 64\]"),
    ("linear_grouped", "x", shape(3, 65), r"\[rows, 64\].*\[3, 65\]"),
    ("linear_grouped", "x", gaps, "contiguous last dimension"),
    ("linear_grouped", "x", elsewhere, "CPU"),
    ("linear_grouped", "x", to(torch.float64), "a bias must be like x"),
    ("linear_grouped", "bias", shape(19), r"like x, \[out\]"),
    ("linear_grouped", "bias", to(HALF), r"like x, \[out\]"),
    ("linear_grouped", "bias", gaps, r"like x, \[out\]"),
    ("linear_grouped", "bias", elsewhere, "CPU"),
    ("rms_norm", "x", shape(8), r"\[rows, size\] or \[rows, heads, size\]"),
    ("rms_norm", "x", shape(1, 1, 1, 8), r"\[rows, size\] or \[rows, heads, size\]"),
    ("rms_norm", "x", shape(3, 9), "don't fit"),
    ("rms_norm", "x", gaps, "don't fit"),
    ("rms_norm", "x", to(HALF), "don't fit"),
    ("rms_norm", "x", elsewhere, "CPU"),
    ("rms_norm", "weight", shape(7), "don't fit"),
    ("rms_norm", "weight", gaps, "don't fit"),
    ("rms_norm", "weight", elsewhere, "CPU"),
    ("add_rms_norm_", "x", shape(8), "don't fit"),
    ("add_rms_norm_", "x", shape(3, 1, 8), "don't fit"),
    ("add_rms_norm_", "x", row_gaps, "don't fit"),
    ("add_rms_norm_", "x", to(HALF), "don't fit"),
    ("add_rms_norm_", "residual", shape(2, 8), "don't fit"),
    ("add_rms_norm_", "residual", row_gaps, "don't fit"),
    ("add_rms_norm_", "residual", to(HALF), "don't fit"),
    ("add_rms_norm_", "residual", elsewhere, "CPU"),
    ("add_rms_norm_", "weight", shape(9), "don't fit"),
    ("add_rms_norm_", "weight", to(HALF), "don't fit"),
    ("rotate_", "positions", numbers(0, 1), r"int64 \[3\]"),
    ("rotate_", "positions", to(torch.int32), r"int64 \[3\]"),
    ("rotate_", "positions", numbers(0, 1, 5), r"5, not in \[0, 5\)"),
    ("rotate_", "positions", numbers(0, -1, 1), r"-1, not in \[0, 5\)"),
    ("rotate_", "positions", elsewhere, "CPU"),
    ("rotate_", "q", shape(3, 32), r"\[tokens, heads, dim\]"),
    ("rotate_", "q", shape(2, 4, 8), r"int64 \[2\]"),
    ("rotate_", "q", shape(3, 4, 7), r"\[tokens, heads, dim\]"),
    ("rotate_", "q", gaps, r"\[tokens, heads, dim\]"),
    ("rotate_", "q", to(torch.float64), "no kernel for Double"),
    ("rotate_", "q", to(F8), "no kernel for Float8_e4m3fn"),
    ("rotate_", "k", shape(3, 2, 6), r"float32 \[positions, dim\]"),
    ("rotate_", "k", elsewhere, "CPU"),
    ("rotate_", "cos_sin", shape(8), r"float32 \[positions, dim\]"),
    ("rotate_", "cos_sin", shape(5, 6), r"float32 \[positions, dim\]"),
    ("rotate_", "cos_sin", value(torch.tensor(1.0)), r"float32 \[positions, dim\]"),
    ("rotate_", "cos_sin", to(HALF), r"float32 \[positions, dim\]"),
    ("rotate_", "cos_sin", row_gaps, r"float32 \[positions, dim\]"),
    ("silu_and_mul", "gate_up", shape(8), r"\[rows, 2 \* size\]"),
    ("silu_and_mul", "gate_up", shape(3, 7), r"\[rows, 2 \* size\]"),
    ("silu_and_mul", "gate_up", row_gaps, "contiguous"),
    ("silu_and_mul", "gate_up", to(torch.int64), "no kernel for Long"),
    ("silu_and_mul", "gate_up", to(F8), "no kernel for Float8_e4m3fn"),
    ("silu_and_mul", "gate_up", elsewhere, "CPU"),
]
WRONG += [
    ("linear", "out", value(1000), "not packed for 1000"),
    ("linear", "out", value(0), "not packed for 0"),
    ("linear", "packed", shape(20), r"\[out, in\]"),
    ("linear", "packed", lambda w: w[:20], "not packed for 20"),
    ("linear", "packed", row_gaps, "not packed"),
    ("linear", "packed", elsewhere, "CPU"),
    ("linear", "bias", shape(19), r"like x, \[out\]"),
    ("linear", "bias", to(HALF), r"like x, \[out\]"),
    ("linear", "bias", gaps, r"like x, \[out\]"),
    ("linear", "bias", elsewhere, "CPU"),
]
WRONG += [
    ("linear", "x", shape(8), r"\[rows, 8\]"),
    ("linear", "x", shape(3, 9), r"\[rows, 8\].*\[3, 9\]"),
    ("linear", "x", shape(1, 3, 8), r"\[rows, 8\]"),
    ("linear", "x", gaps, "contiguous last dimension"),
    ("linear", "x", elsewhere, "CPU"),
]
WRONG += [
    ("linear", "x", to(HALF), "BFloat16 and the weight Float"),
    ("linear", "packed", to(torch.float64), "x is Float and the weight Double"),
    ("unpack_rows", "out", value(1000), "not packed for 1000"),
    ("unpack_rows", "out", value(-5), "not packed for -5"),
    ("unpack_rows", "packed", shape(20), r"\[out, in\]"),
    ("unpack_rows", "packed", lambda w: w[:15], "not packed for 20"),
    ("unpack_rows", "packed", row_gaps, "not packed"),
    ("unpack_rows", "packed", to(torch.float64), "no kernel for Double"),
    ("unpack_rows", "packed", to(torch.int8), "no kernel for Char"),
    ("unpack_rows", "packed", lambda w: w[:, :7].to(HALF).contiguous(), "must be even"),
    ("unpack_rows", "packed", elsewhere, "CPU"),
    ("unpack_rows", "ids", to(torch.int32), r"int64 \[3\]"),
    ("unpack_rows", "ids", gaps, "contiguous"),
    ("unpack_rows", "ids", lambda ids: ids[:, None], r"int64 \[rows\], not \[3, 1\]"),
    ("unpack_rows", "ids", numbers(0, 20), r"20, not in \[0, 20\)"),
    ("unpack_rows", "ids", numbers(-1, 0), r"-1, not in \[0, 20\)"),
    ("unpack_rows", "ids", elsewhere, "CPU"),
]
for heads in ("q", "k", "v"):
    wrong_size = "the rows have 3 tokens, q has 2" if heads == "q" else r"\[tokens, heads, dim\]"
    WRONG += [
        ("attention", heads, shape(2, 2, 8), wrong_size),
        ("attention", heads, row_gaps, "contiguous heads"),
        ("attention", heads, gaps, "contiguous heads"),
        ("attention", heads, to(HALF), "of one type"),
        ("attention", heads, elsewhere, "CPU"),
    ]
for pool in ("k_pool", "v_pool"):
    WRONG += [
        ("attention", pool, shape(31, 2, 8), "pools must be"),
        ("attention", pool, row_gaps, "pools must be"),
        ("attention", pool, to(HALF), "pools must be"),
        ("attention", pool, elsewhere, "CPU"),
    ]
for index, size in (("slots", 3), ("requests", 1), ("starts", 2), ("lengths", 1)):
    WRONG += [
        ("attention", index, to(torch.int32), rf"int64 \[{size}\]"),
        ("attention", index, elsewhere, "CPU"),
    ]
WRONG += [
    ("attention", "q", shape(3, 32), "3 dimensions"),
    ("attention", "q", shape(3, 3, 8), "3 query heads, 2 key heads"),
    ("attention", "q", shape(3, 0, 8), "0 query heads"),
    ("attention", "k", shape(3, 1, 8), r"\[tokens, heads, dim\]"),
    ("attention", "v", shape(3, 2, 16), r"\[tokens, heads, dim\]"),
    ("attention", "k_pool", shape(32, 16), "3 dimensions"),
    ("attention", "slots", numbers(4, 5), r"\[tokens, heads, dim\]"),
    ("attention", "slots", numbers(4, 5, 32), r"32, not in \[0, 32\)"),
    ("attention", "slots", numbers(-1, 5, 6), r"-1, not in \[0, 32\)"),
    ("attention", "table", to(torch.int64), r"int32 \[rows, positions\]"),
    ("attention", "table", shape(16), r"int32 \[rows, positions\]"),
    ("attention", "table", row_gaps, r"int32 \[rows, positions\]"),
    ("attention", "table", elsewhere, "CPU"),
    ("attention", "requests", numbers(2), r"2, not in \[0, 2\)"),
    ("attention", "requests", numbers(-1), r"-1, not in \[0, 2\)"),
    ("attention", "requests", numbers(0, 1), r"int64 \[3\]"),
    ("attention", "starts", numbers(0, 4), "the rows have 4 tokens, q has 3"),
    ("attention", "starts", numbers(1, 3), "the rows have 3 tokens"),
    ("attention", "sinks", value(torch.ones(1)), r"float32 \[heads\]"),
    ("attention", "sinks", value(torch.ones(2).double()), r"float32 \[heads\]"),
    ("attention", "lengths", numbers(2), "row 0 has 3 of 2 tokens"),
    ("attention", "lengths", numbers(9), "room for 8"),
    ("attention", "lengths", numbers(3, 3), r"int64 \[1\]"),
]


@pytest.mark.parametrize(
    ("binding", "argument", "change", "message"),
    [pytest.param(*wrong, id=f"{wrong[0]}-{wrong[1]}") for wrong in WRONG],
)
def test_what_does_not_fit(
    kernels: Any, binding: str, argument: str, change: Change, message: str
) -> None:
    given = arguments(kernels, binding)
    getattr(kernels, binding)(*given.values())
    given[argument] = change(given[argument])
    before = [x.clone() for x in given.values() if isinstance(x, Tensor)]
    with pytest.raises(RuntimeError, match=message):
        getattr(kernels, binding)(*given.values())
    after = [x for x in given.values() if isinstance(x, Tensor)]
    for old, new in zip(before, after, strict=True):
        assert old.is_meta or argument in ("q", "k") or same_bits(old, new)


def test_heads_and_types_without_a_kernel(kernels: Any) -> None:
    """Errors that take several arguments to be met."""
    for dim, heads, kv_heads in ((578, 2, 2), (7, 2, 2), (8, 2, 0)):
        given = arguments(kernels, "attention")
        given["q"] = torch.zeros(3, heads, dim)
        given["k"] = given["v"] = torch.zeros(3, kv_heads, dim)
        given["k_pool"] = given["v_pool"] = torch.zeros(32, kv_heads, dim)
        with pytest.raises(RuntimeError, match=f"{kv_heads} key heads of {dim}"):
            kernels.attention(*given.values())
    tensors = ("q", "k", "v", "k_pool", "v_pool")
    for dtype, name in ((torch.float64, "Double"), (F8, "Float8_e4m3fn")):
        given = arguments(kernels, "attention")
        given.update({name: given[name].to(dtype) for name in tensors})
        with pytest.raises(RuntimeError, match=f"no kernel for {name}"):
            kernels.attention(*given.values())
        for binding in ("rms_norm", "add_rms_norm_"):
            given = arguments(kernels, binding)
            given = {k: x.to(dtype) if isinstance(x, Tensor) else x for k, x in given.items()}
            with pytest.raises(RuntimeError, match=f"no kernel for {name}"):
                getattr(kernels, binding)(*given.values())
        with pytest.raises(RuntimeError, match=f"no kernel for {name}"):
            kernels.linear(torch.ones(3, 8).to(dtype), torch.ones(64, 8).to(dtype), None, 64, False)
    given = arguments(kernels, "attention")
    given.update({name: given[name].half() for name in ("k_pool", "v_pool")})
    with pytest.raises(RuntimeError, match="queries' type or float8_e4m3fn"):
        kernels.attention(*given.values())
    given = arguments(kernels, "attention") | {"starts": torch.tensor([0, 4, 3])}
    given |= {"requests": torch.tensor([0, 1]), "lengths": torch.tensor([4, 4])}
    with pytest.raises(RuntimeError, match="row 1 has -1 of 4 tokens"):
        kernels.attention(*given.values())
    odd = torch.ones(64, 7, dtype=HALF)
    for product in (
        lambda: kernels.linear(odd, odd, None, 64, False),
        lambda: kernels.unpack_rows(odd, torch.tensor([0]), 64),
    ):
        with pytest.raises(RuntimeError, match="must be even"):
            product()


def test_what_is_no_tensor(kernels: Any) -> None:
    for wrong in (None, 3, [[1.0, 2.0]], "x"):
        with pytest.raises(TypeError):
            kernels.silu_and_mul(wrong)


def test_after_an_error_the_kernels_still_work(kernels: Any) -> None:
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError):
        kernels.silu_and_mul(x[0])
    torch.testing.assert_close(kernels.silu_and_mul(x), torch.full((2, 2), 0.7310586))
