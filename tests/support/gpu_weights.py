"""Quantized matrices for the kernels of GPUs, and what these must give: for CPU, where Triton's
interpreter runs them, and for tests/gpu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.layers.float8_groups import Float8Groups
from engine.layers.gpu_experts import GpuExperts
from engine.layers.gpu_kernel import GpuKernel
from engine.layers.gpu_weight import LANES, GpuWeight, Kind, can_pack, pack
from engine.layers.grouped import Grouped

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Relative, of an output: half of a last bit, and more in bfloat16, which some cards truncate."""
SUMS = 2.0**-17
"""Of float32 sums beside the sum of all products without their signs."""


@dataclass(frozen=True)
class Case:
    """A matrix of `kind`: a number of bits, "float4", "float8" or "two scales" (K-quants)."""

    kind: int | str
    group: int
    """0: all inputs."""
    has_mins: bool = False
    outputs: int = 72
    inputs: int = 384

    def source(self, seed: int = 0) -> Grouped | Float8Groups:
        """The matrix as a checkpoint has it."""
        torch.manual_seed(seed)
        shape, group = (self.outputs, self.inputs), self.group or self.inputs
        by_group = (self.outputs, self.inputs // group)
        scales = torch.rand(by_group) * 0.02 + 0.001
        if self.kind == "float8":
            return Float8Groups(torch.randn(shape).to(torch.float8_e4m3fn), group, scales)
        if self.kind == "float4":
            steps = torch.tensor([int(2 * x) for x in FLOAT4])[torch.randint(8, shape)]
            signs = torch.randint(0, 2, shape) * 2 - 1
            return Grouped((12 + steps * signs).to(torch.uint8), 5, 12, group, scales)
        if self.kind == "two scales":
            return Grouped(
                torch.randint(16, shape, dtype=torch.uint8),
                4,
                0,
                group,
                torch.rand(self.outputs, 1).half() * 0.01,
                torch.rand(self.outputs, 1).half() * 0.01,
                torch.randint(1, 64, by_group, dtype=torch.int8),
                torch.randint(0, 64, by_group, dtype=torch.int8),
            )
        assert isinstance(self.kind, int)
        top = 1 << self.kind
        mins = torch.randn(by_group) * 0.05 if self.has_mins else None
        numbers = torch.randint(top, shape, dtype=torch.uint8)
        return Grouped(numbers, self.kind, top // 2, group, scales.half(), mins)

    def weight(self, device: torch.device, seed: int = 0) -> GpuWeight:
        """The same as the kernels have it."""
        source = self.source(seed)
        assert can_pack(source)
        return to_device(pack(source), device)


CASES = (
    *(Case(4, group) for group in (16, 32, 64, 128)),
    *(Case(8, group) for group in (16, 48, 128)),
    Case(4, 128, has_mins=True),
    Case(8, 32, has_mins=True),
    Case(2, 32),
    Case(4, 0, inputs=200),
    Case(5, 32, has_mins=True, inputs=96),
    Case(6, 16, inputs=336),
    Case(8, 0, inputs=203, outputs=129),
    Case(8, 0, has_mins=True),
    Case("float4", 16),
    Case("float4", 32, outputs=65, inputs=96),
    Case("float8", 128),
    Case("float8", 0, outputs=33, inputs=200),
    Case("two scales", 32, outputs=200, inputs=512),
)


def to_device(weight: GpuWeight, device: torch.device) -> GpuWeight:
    """`weight` there."""
    mins = None if weight.mins is None else weight.mins.to(device)
    words, scales = weight.words.to(device), weight.scales.to(device)
    return replace(weight, words=words, scales=scales, mins=mins)


def meant(weight: GpuWeight) -> Tensor:
    """float64 [out, in] on CPU: what the codes stand for, looked up one plane after the other."""
    bits, words = weight.kind.bits, weight.words.cpu().long() & 0xFFFFFFFF
    planes = [(words >> bits * plane) & ((1 << bits) - 1) for plane in range(32 // bits)]
    codes = torch.stack(planes, 2).permute(1, 0, 2, 3).flatten(1)[:, : weight.inputs]
    if weight.kind is Kind.FLOAT4:
        table = torch.tensor([*FLOAT4, *(-x for x in FLOAT4)], dtype=torch.float64)
        numbers = table[codes]
    elif weight.kind is Kind.FLOAT8:
        numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    else:
        numbers = codes.double() - weight.center
    times = weight.group or weight.inputs

    def spread(values: Tensor) -> Tensor:
        return values.cpu().double().t().repeat_interleave(times, 1)

    found = numbers * spread(weight.scales)
    return found if weight.mins is None else found - spread(weight.mins)


def rows_for(weight: GpuWeight, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Inputs [num_rows, in] with gaps between rows."""
    torch.manual_seed(num_rows)
    whole = torch.randn(num_rows, weight.inputs + LANES, device=weight.words.device)
    return whole.to(dtype)[:, : weight.inputs]


def check_product(
    kernel: GpuKernel, num_rows: int, dtype: torch.dtype, *, is_plain: bool = False
) -> Tensor:
    """The kernel's outputs for some rows, which are those of float64 but for roundings. `is_plain`:
    the matrix is rounded to `dtype`, too."""
    x = rows_for(kernel.weights[0], num_rows, dtype)
    found = kernel(x)
    assert found.dtype == dtype and found.device == x.device
    assert found.shape == (num_rows, kernel.out_size)
    if not num_rows:
        return found
    _check(x, kernel.weights, kernel.bias, found, is_plain=is_plain)
    return found


def _check(
    x: Tensor, weights: Sequence[GpuWeight], bias: Tensor | None, found: Tensor, *, is_plain: bool
) -> None:
    exact, rows = torch.cat([meant(weight) for weight in weights]), x.cpu().double()
    wanted, sizes = rows @ exact.t(), rows.abs() @ exact.abs().t()
    for weight in weights:
        if weight.mins is not None:  # they are taken off sums of positive numbers
            sizes = sizes + 2 * rows.abs().sum(1, keepdim=True) * float(weight.mins.abs().max())
    if bias is not None:
        wanted = wanted + bias.cpu().double()
    rounding = ROUNDING[found.dtype]
    allowed = SUMS + (rounding if is_plain else 0.0)
    error = (found.cpu().double() - wanted).abs()
    worst = (error - rounding * wanted.abs() - allowed * sizes).max()
    assert float(worst) <= 1e-7, float(worst)


def experts_of(
    case: Case, count: int, device: torch.device, bias: torch.dtype | None = None
) -> GpuExperts:
    """Matrices of `case` with other numbers each, with a bias of this type."""
    made = GpuExperts.of([[case.source(seed)] for seed in range(count)], None)
    assert made is not None
    beside = None if bias is None else torch.randn(count, case.outputs, device=device).to(bias)
    return GpuExperts(to_device(made.weight, device), beside)


def ends_of(counts: Sequence[int], device: torch.device) -> Tensor:
    """Where the rows of each expert end."""
    return torch.tensor(counts).cumsum(0).int().to(device)


def expert_of(experts: GpuExperts, number: int) -> GpuWeight:
    """One of its matrices."""
    weight, count = experts.weight, len(experts)

    def own(values: Tensor) -> Tensor:
        return values.chunk(count)[number]

    mins = None if weight.mins is None else own(weight.mins)
    found = replace(weight, words=own(weight.words), scales=own(weight.scales), mins=mins)
    return replace(found, matrices=1)


def meant_by(experts: GpuExperts, x: Tensor, counts: Sequence[int]) -> Tensor:
    """float64: the products of rows that are sorted by expert, without a bias."""
    rows = x[: sum(counts)].cpu().double().split(list(counts))
    return torch.cat(
        [own @ meant(expert_of(experts, number)).t() for number, own in enumerate(rows)]
    )


def check_experts(experts: GpuExperts, counts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `check_product`, with `counts` rows of each expert, and some behind them."""
    x = rows_for(experts.weight, sum(counts) + 3, dtype)
    found = experts(x, ends_of(counts, x.device))
    assert found.dtype == dtype and found.shape == (len(x), experts.weight.shape[0])
    start = 0
    for number, count in enumerate(counts):
        here = slice(start, start + count)
        bias = None if experts.bias is None else experts.bias[number]
        if count:
            _check(x[here], [expert_of(experts, number)], bias, found[here], is_plain=False)
        start = here.stop
    return found
