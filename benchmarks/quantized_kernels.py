"""Products with quantized matrices on CPU, beside those of the model's own type: microseconds.

A matrix of 4096 x 1024 by 1 to 256 rows of bfloat16 (float32 where the CPU doesn't multiply it).
Inputs are as precise as their type, and with 8 bits. Several matrices take turns, so that they
don't stay in the nearest caches. The least time of some repeats counts, because other programs only
ever add to it.

ok: with 4 bits, one row takes at most half of the time of bfloat16.

    python benchmarks/quantized_kernels.py [--threads 1] [--save [FILE]]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import REPO_ROOT, finish, print_table, save_result
from benchmarks.load.arguments import positive
from engine.layers.grouped import Grouped
from engine.layers.linear_kernel import GroupedKernel, LinearKernel, NativeKernel
from engine.native.library import require_kernels

SAVE_TO = REPO_ROOT / "benchmarks" / "results" / "quantized-kernels.json"
OUT, INPUTS, COPIES, REPEATS = 4096, 1024, 8, 9
ROWS = (1, 2, 4, 8, 32, 256)
FORMS = {
    "Q8_0": (8, 32, False, False),
    "Q4_0": (4, 32, False, False),
    "Q4_1": (4, 32, True, False),
    "4 bits by 128": (4, 128, False, False),
    "Q4_K": (4, 32, True, True),
    "Q5_0": (5, 32, False, False),
    "Q6_K": (6, 16, False, True),
}
"""Bits, group, whether there are minima, and whether small groups have codes for scales."""


def matrix(bits: int, group: int, has_mins: bool, has_codes: bool, seed: int) -> Grouped:
    """Random numbers and scales."""
    generator = torch.Generator().manual_seed(seed)
    columns = INPUTS // (256 if has_codes else group)

    def halves() -> Tensor:
        return (torch.rand(OUT, columns, generator=generator) * 0.01 + 0.001).half()

    def codes() -> Tensor:
        shape = (OUT, INPUTS // group)
        return torch.randint(1, 64, shape, generator=generator, dtype=torch.int8)

    return Grouped(
        torch.randint(0, 1 << bits, (OUT, INPUTS), generator=generator, dtype=torch.uint8),
        bits,
        0 if has_mins else 1 << (bits - 1),
        group,
        halves(),
        halves() if has_mins else None,
        codes() if has_codes else None,
        codes() if has_codes and has_mins else None,
    )


def microseconds(kernels: list[LinearKernel], x: Tensor) -> float:
    """Of one product."""

    def once() -> float:
        started = time.perf_counter()
        for kernel in kernels:
            kernel(x)
        return time.perf_counter() - started

    return min(once() for _ in range(REPEATS)) / len(kernels) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--save", nargs="?", type=Path, const=SAVE_TO)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    isa = require_kernels().isa()
    dtype = torch.bfloat16 if isa in ("avx512bf16", "amx") else torch.float32
    plain = str(dtype).removeprefix("torch.")

    def make_plain(seed: int) -> LinearKernel:
        generator = torch.Generator().manual_seed(seed)
        return NativeKernel(torch.randn(OUT, INPUTS, generator=generator).to(dtype), None)

    def make(form: tuple[int, int, bool, bool], short: bool) -> Callable[[int], LinearKernel]:
        return lambda seed: GroupedKernel([matrix(*form, seed)], None, short)

    makers = {plain: make_plain}
    for ending, short in (("", False), (", 8-bit inputs", True)):
        makers |= {f"{name}{ending}": make(form, short) for name, form in FORMS.items()}
    times: dict[str, dict[int, float]] = {}
    for name, maker in makers.items():
        kernels = [maker(seed) for seed in range(COPIES)]
        times[name] = {
            rows: microseconds(kernels, torch.randn(rows, INPUTS).to(dtype)) for rows in ROWS
        }
    print_table(
        ["matrix", *(f"{rows} rows" for rows in ROWS)],
        [[name, *by_rows.values()] for name, by_rows in times.items()],
    )
    ok = times["Q4_0"][1] <= times[plain][1] / 2
    figures = {
        "benchmark": "quantized_kernels",
        "instruction_set": isa,
        "threads": args.threads,
        "outputs": OUT,
        "inputs": INPUTS,
        "microseconds": times,
    }
    if args.save:
        save_result(args.save, figures, ok)
    finish(figures, ok)


if __name__ == "__main__":
    main()
