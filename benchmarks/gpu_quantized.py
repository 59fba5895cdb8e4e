"""Products with quantized matrices on one GPU, beside those of bfloat16.

Matrices have the shapes of an 8B, and of the experts of two mixtures. Each product is repeated over
so many matrices that they can't stay in the card's cache, in one CUDA graph, so that the host
doesn't count. What fails is a note beside the other figures, which are written nevertheless. Under
a minute on an H200:

    python benchmarks/gpu_quantized.py --save
    python benchmarks/gpu_quantized.py --sweep --save           # other tiles, too
    TRITON_INTERPRET=1 python benchmarks/gpu_quantized.py --quick --device cpu
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import REPO_ROOT, finish, print_table, save_result
from benchmarks.gpu_bench.card import describe, release, seconds_per_call
from benchmarks.load.arguments import positive
from engine.layers.gpu_experts import GpuExperts
from engine.layers.gpu_kernel import FUSED_ROWS, GpuKernel
from engine.layers.gpu_tile import TILES, Tile
from engine.layers.gpu_weight import LANES, GpuWeight, Kind

RESULT = REPO_ROOT / "benchmarks" / "results" / "gpu-quantized.json"
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (6144, 4096))
"""Outputs and inputs: attention's output, gate and up, down, query with key and value."""
ROWS = (1, 16, 64, 256, 2048)
CACHE_BYTES = 1 << 28
"""More than the largest GPUs keep."""
MAX_COPIES = 16
ROUTINGS = 8
"""Of a mixture, one after the other: each has other experts."""
SECONDS = 0.02
"""Of a measurement."""
SWEPT = (
    *(Tile(16, outputs, warps, 4) for outputs, warps in ((32, 2), (64, 4), (128, 4), (128, 8))),
    *(Tile(16, 64, 2, stages) for stages in (2, 3, 6)),
    *(Tile(32, outputs, warps, 4) for outputs, warps in ((64, 2), (128, 4), (128, 8))),
    *(Tile(64, outputs, warps, 4) for outputs, warps in ((64, 4), (128, 4))),
    Tile(64, 128, 8, 3),
    Tile(128, 128, 8, 3),
)
"""Beside those that are used."""


class Form(NamedTuple):
    """What matrices are quantized as."""

    kind: Kind
    group: int
    center: int


FORMS = {
    "4 bits, groups of 128": Form(Kind.WHOLE4, 128, 8),
    "8 bits, by output": Form(Kind.WHOLE8, 0, 128),
    "FP8, groups of 128": Form(Kind.FLOAT8, 128, 0),
}


class MixtureShape(NamedTuple):
    """One of the two products of each expert."""

    name: str
    experts: int
    per_token: int
    outputs: int
    inputs: int


MIXTURES = (
    MixtureShape("gpt-oss-20b, up", 32, 4, 5760, 2880),
    MixtureShape("Qwen3-30B-A3B, up", 128, 8, 1536, 2048),
    MixtureShape("Qwen3-30B-A3B, down", 128, 8, 2048, 768),
)
EXPERT_FORMS = {
    "float4, groups of 32": Form(Kind.FLOAT4, 32, 0),
    "FP8, groups of 128": FORMS["FP8, groups of 128"],
}
T = TypeVar("T")
DENSE, TINYGEMM = "bfloat16", "torch's 4 bits"


@dataclass
class Report:
    """What was measured, and what wasn't."""

    device: torch.device
    budget_s: float
    started_at: float = field(default_factory=time.monotonic)
    rows: list[dict[str, object]] = field(default_factory=list)
    mixtures: list[dict[str, object]] = field(default_factory=list)
    sweep: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measure(
        self,
        name: str,
        shape: tuple[int, int],
        num_rows: int,
        num_bytes: int,
        run: Callable[[int], object],
        copies: int,
    ) -> None:
        """Add the time of a product with a matrix of `num_bytes`."""
        seconds = self.time_of(f"{name}, {shape}, {num_rows} rows", run, copies)
        self.rows.append(
            {
                "matrix": name,
                "outputs": shape[0],
                "inputs": shape[1],
                "rows": num_rows,
                "us": None if seconds is None else seconds * 1e6,
                "weight_bytes_per_s": None if seconds is None else num_bytes / seconds,
            }
        )

    def try_tile(
        self,
        tile: str,
        parts: int | None,
        shape: tuple[int, int],
        num_rows: int,
        run: Callable[[int], object],
    ) -> None:
        """Add the time of a product that is computed in another way than the engine's."""
        copies = copies_of(shape[0] * shape[1] // 2)
        seconds = self.time_of(f"tile {tile}, {shape}, {num_rows} rows", run, copies)
        self.sweep.append(
            {
                "tile": tile,
                "parts": parts,
                "outputs": shape[0],
                "inputs": shape[1],
                "rows": num_rows,
                "us": None if seconds is None else seconds * 1e6,
            }
        )

    def time_of(self, what: str, run: Callable[[int], object], copies: int) -> float | None:
        """Seconds of `run`, which is given the number of a matrix; None: a note says why not."""
        if time.monotonic() - self.started_at > self.budget_s:
            self.notes.append(f"{what}: the time was over")
            return None
        try:
            return time_of(run, copies, self.device)
        except Exception as error:  # whatever a kernel may raise: other figures are still wanted
            self.notes.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
            return None


def time_of(run: Callable[[int], object], copies: int, device: torch.device) -> float:
    """Mean seconds of `run` over its matrices."""

    def all_of_them() -> None:
        for number in range(copies):
            run(number)

    if device.type != "cuda":
        return seconds_per_call(all_of_them, 1, device) / copies
    run(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    once = seconds_per_call(graph.replay, 2, device)
    count = max(3, min(200, int(SECONDS / once)))
    return seconds_per_call(graph.replay, count, device) / copies


def main(argv: list[str] | None = None) -> bool:
    """Run; returns whether all was measured."""
    args = parse(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; --quick --device cpu tries the script without one")
    report = Report(device, args.budget_s)
    shapes: Sequence[tuple[int, int]] = [(64, 256)] if args.quick else SHAPES
    rows: Sequence[int] = (1, FUSED_ROWS + 1) if args.quick else ROWS
    torch.manual_seed(0)
    for shape in shapes:
        measure_shape(shape, rows, report)
        release(device)
    tiny = MixtureShape("tiny", 4, 2, 64, 256)
    for mixture in [tiny] if args.quick else MIXTURES:
        measure_mixture(mixture, rows, report)
        release(device)
    if args.sweep:
        for shape in shapes[1:3] or shapes:
            sweep(shape, rows, report)
            release(device)
    print_report(report)
    ok = not report.notes
    figures: dict[str, object] = {
        "card": describe(device),
        "products": report.rows,
        "mixtures": report.mixtures,
        "sweep": report.sweep,
        "notes": report.notes,
        "seconds": time.monotonic() - report.started_at,
    }
    if args.save:
        save_result(RESULT, figures, ok)
    finish(figures, ok)
    return ok


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="one tiny shape")
    parser.add_argument("--sweep", action="store_true", help="other tiles for 4 bits, too")
    parser.add_argument(
        "--budget-s", type=positive, default=60, help="after it nothing new is begun"
    )
    parser.add_argument("--save", action="store_true", help="write the result")
    return parser.parse_args(argv)


def measure_shape(shape: tuple[int, int], rows: Sequence[int], report: Report) -> None:
    """All kinds of matrices of `shape`, outputs and inputs."""
    outputs, inputs = shape
    dense = make_copies(
        lambda: torch.randn(shape, device=report.device, dtype=torch.bfloat16), 2 * outputs * inputs
    )
    kernels = {
        name: make_copies(
            partial(make_kernel, form, shape, report.device),
            outputs * inputs * form.kind.bits // 8,
        )
        for name, form in FORMS.items()
    }
    tiny = tinygemm(shape, report)
    for num_rows in rows:
        x = torch.randn(num_rows, inputs, device=report.device).bfloat16()
        report.measure(
            DENSE, shape, num_rows, dense[0].nbytes, partial(dense_product, dense, x), len(dense)
        )
        for name, made in kernels.items():
            size = made[0].num_bytes
            report.measure(name, shape, num_rows, size, partial(product, made, x), len(made))
        if tiny:
            size = sum(tensor.nbytes for tensor in tiny[0])
            run = partial(tinygemm_product, tiny, x)
            report.measure(TINYGEMM, shape, num_rows, size, run, len(tiny))


def dense_product(weights: list[Tensor], x: Tensor, number: int) -> None:
    F.linear(x, weights[number])


def product(kernels: list[GpuKernel], x: Tensor, number: int) -> None:
    kernels[number](x)


def plain_product(kernels: list[GpuKernel], x: Tensor, number: int) -> None:
    kernels[number]._plain_product(x)


def tinygemm_product(weights: list[tuple[Tensor, Tensor]], x: Tensor, number: int) -> None:
    codes, scales = weights[number]
    torch.ops.aten._weight_int4pack_mm(x, codes, 128, scales)


def make_copies(make: Callable[[], T], num_bytes: int) -> list[T]:
    """So many of what `make` gives that they don't fit into the card's cache."""
    return [make() for _ in range(copies_of(num_bytes))]


def copies_of(num_bytes: int) -> int:
    """How many matrices of `num_bytes` that is."""
    return min(MAX_COPIES, -(-CACHE_BYTES // num_bytes))


def make_kernel(form: Form, shape: tuple[int, int], device: torch.device) -> GpuKernel:
    """Of one random matrix."""
    return GpuKernel([make_weight(form, shape, device)], None)


def make_weight(
    form: Form, shape: tuple[int, int], device: torch.device, matrices: int = 1
) -> GpuWeight:
    """Random numbers and scales."""
    outputs, inputs = shape
    chunks = -(-inputs // form.kind.chunk) * matrices
    words = torch.randint(-(2**31), 2**31, (chunks, outputs, LANES), device=device)
    if form.kind is Kind.FLOAT8:
        words &= 0x77777777  # without the two codes that are no numbers
    groups = -(-inputs // form.group) if form.group else 1
    scales = torch.rand((groups * matrices, outputs), device=device).half() * 0.01
    parts = form.kind, words.int(), inputs, form.center, form.group, scales, None, matrices
    return GpuWeight(*parts)


def measure_mixture(mixture: MixtureShape, tokens: Sequence[int], report: Report) -> None:
    """Products of rows with their experts, in bfloat16 and in `EXPERT_FORMS`."""
    device, shape = report.device, (mixture.outputs, mixture.inputs)
    # Their values don't matter: as few random numbers as possible.
    dense = torch.empty((mixture.experts, *shape), device=device, dtype=torch.bfloat16)
    dense.copy_(torch.randn(shape, device=device))
    packed = {
        name: GpuExperts(make_weight(form, shape, device, mixture.experts), None)
        for name, form in EXPERT_FORMS.items()
    }
    for num_tokens in tokens:
        x = torch.randn(num_tokens * mixture.per_token, mixture.inputs, device=device).bfloat16()
        ends = [routing(mixture, num_tokens).to(device) for _ in range(ROUTINGS)]
        runs: dict[str, Callable[[int], object]] = {DENSE: partial(dense_experts, dense, x, ends)}
        runs |= {name: partial(packed_experts, made, x, ends) for name, made in packed.items()}
        for name, run in runs.items():
            what = f"{mixture.name}, {name}, {num_tokens} tokens"
            seconds = report.time_of(what, run, ROUTINGS)
            report.mixtures.append(
                {
                    "mixture": mixture.name,
                    "matrix": name,
                    "experts": mixture.experts,
                    "per_token": mixture.per_token,
                    "outputs": mixture.outputs,
                    "inputs": mixture.inputs,
                    "tokens": num_tokens,
                    "us": None if seconds is None else seconds * 1e6,
                }
            )


def routing(mixture: MixtureShape, num_tokens: int) -> Tensor:
    """Where each expert's rows end, when every token goes to some at random."""
    chosen = torch.rand(num_tokens, mixture.experts).argsort(1)[:, : mixture.per_token]
    return chosen.flatten().bincount(minlength=mixture.experts).cumsum(0).int()


def dense_experts(matrices: Tensor, x: Tensor, ends: list[Tensor], number: int) -> None:
    F.grouped_mm(x, matrices.transpose(1, 2), offs=ends[number])


def packed_experts(experts: GpuExperts, x: Tensor, ends: list[Tensor], number: int) -> None:
    experts(x, ends[number])


def tinygemm(shape: tuple[int, int], report: Report) -> list[tuple[Tensor, Tensor]]:
    """Matrices for torch's own product with 4 bits in groups of 128; none if that isn't there."""
    outputs, inputs = shape
    device = report.device
    if device.type != "cuda":
        return []

    def make() -> tuple[Tensor, Tensor]:
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
        scales = torch.rand(inputs // 128, outputs, 2, device=device).bfloat16()
        return torch.ops.aten._convert_weight_to_int4pack(codes, 8), scales

    try:
        return make_copies(make, outputs * inputs // 2)
    except Exception as error:  # a private operator, which may want other arguments
        report.notes.append(f"{TINYGEMM}: {type(error).__name__}: {str(error)[:300]}")
        return []


def sweep(shape: tuple[int, int], rows: Sequence[int], report: Report) -> None:
    """4 bits by other tiles, by other numbers of parts, and by the plain matrix."""
    outputs, inputs = shape
    form = next(iter(FORMS.values()))
    kernels = make_copies(partial(make_kernel, form, shape, report.device), outputs * inputs // 2)
    for num_rows in rows:
        if num_rows > FUSED_ROWS:
            continue
        x = torch.randn(num_rows, inputs, device=report.device).bfloat16()
        report.try_tile("dequantized", None, shape, num_rows, partial(plain_product, kernels, x))
        for tile in (*TILES, *SWEPT):
            if not min(num_rows, 64) <= tile.rows <= max(16, 2 * num_rows):
                continue
            best = tile.splits(kernels[0].weights[0])
            for splits in sorted({max(1, best // 2), best, best * 2} if tile in TILES else {best}):
                run = partial(product_by, kernels, x, tile, splits)
                report.try_tile(" ".join(map(str, tile)), splits, shape, num_rows, run)


def product_by(kernels: list[GpuKernel], x: Tensor, tile: Tile, splits: int, number: int) -> None:
    """One by a tile of the caller's choice."""
    weight = kernels[number].weights[0]
    out = torch.empty(len(x), weight.shape[0], device=x.device, dtype=x.dtype)
    kernel = kernels[number]
    kernel._kernels.multiply(x, weight, None, out, kernel._arrived[0], tile, splits)


def print_report(report: Report) -> None:
    """Print microseconds by matrix and rows, and the notes."""
    found = {
        (row["matrix"], row["outputs"], row["inputs"], row["rows"]): row for row in report.rows
    }
    names = list(dict.fromkeys(str(row["matrix"]) for row in report.rows))
    places = list(dict.fromkeys(key[1:] for key in found))
    cells = [
        [f"{place[0]} x {place[1]}", place[2]]
        + [(found.get((name, *place)) or {}).get("us") for name in names]
        for place in places
    ]
    print("microseconds of a product")
    print_table(["matrix", "rows", *names], cells)
    mixtures: dict[tuple[object, object], dict[str, object]] = {}
    for row in report.mixtures:
        cells_of = mixtures.setdefault((row["mixture"], row["tokens"]), {})
        cells_of[str(row["matrix"])] = row["us"]
    names = [DENSE, *EXPERT_FORMS]
    print("\nmicroseconds of a product of all experts")
    print_table(
        ["mixture", "tokens", *names],
        [[*place, *map(found.get, names)] for place, found in mixtures.items()],
    )
    if report.sweep:
        print("\nother tiles (rows, outputs, warps, stages)")
        keys = ["tile", "parts", "outputs", "inputs", "rows", "us"]
        print_table(keys, [[row[key] for key in keys] for row in report.sweep])
    for note in report.notes:
        print(note)
    print()


if __name__ == "__main__":
    main()
