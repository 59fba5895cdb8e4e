"""The card's best rates, and its description."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib import metadata
from time import perf_counter

import torch

from benchmarks.gpu_bench.shapes import CardRates


def seconds_per_call(run: Callable[[], object], count: int, device: torch.device) -> float:
    """Mean time of `count` calls on the current stream, after three that don't count."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        started = perf_counter()
        for _ in range(count):
            run()
        return (perf_counter() - started) / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def measure_rates(device: torch.device, *, copy_bytes: int, matrix: int) -> CardRates:
    """Bandwidth of a copy of `copy_bytes`, rate of a product of bfloat16 [matrix, matrix]."""
    rates = CardRates(_copy_rate(device, copy_bytes), _product_rate(device, matrix))
    release(device)
    return rates


def _copy_rate(device: torch.device, num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_per_call(lambda: target.copy_(source), 20, device)


def _product_rate(device: torch.device, size: int) -> float:
    # Random numbers: with zeros a card computes faster than in real use.
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    seconds = seconds_per_call(lambda: torch.mm(left, right, out=product), 20, device)
    return 2 * size**3 / seconds


def release(device: torch.device) -> None:
    """Give back the device memory that torch keeps but doesn't use."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def describe(device: torch.device) -> dict[str, object]:
    """Name, memory, driver and library versions, ready for JSON."""
    try:
        flashinfer: str | None = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        flashinfer = None
    if device.type != "cuda":
        return {"device": device.type, "flashinfer": flashinfer}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 2),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "flashinfer": flashinfer,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
