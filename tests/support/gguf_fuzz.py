"""Damaged GGUF files: each is read, or refused with one `ConfigError`."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

from engine.checkpoint.gguf.checkpoint import read_checkpoint
from engine.checkpoint.gguf.folder import folder_contents
from engine.errors import ConfigError
from engine.layers import gguf_source
from engine.layers.linear_kernel import GroupedKernel, NativeKernel
from engine.layers.weight_format import MatrixSlice, has_kernel

_EDGES = (0, 1, 2, 7, 8, 9, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
"""Numbers that sizes and counts are replaced by."""


def damaged(data: bytes, seed: int) -> bytes:
    """`data` with one to four mutations, most of them near its start, where the header is."""
    dice = random.Random(seed)
    made = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        reach = len(made) if dice.random() < 0.2 else min(len(made), 1 << dice.randint(5, 14))
        place = dice.randrange(max(1, reach))
        match dice.randrange(6):
            case 0:
                made[place : place + 1] = bytes([dice.randrange(256)])
            case 1:
                width = dice.choice((4, 8))
                number = dice.choice(_EDGES) % 2 ** (8 * width)
                made[place : place + width] = number.to_bytes(width, "little")
            case 2:
                del made[place:]
            case 3:
                del made[place : place + dice.randint(1, 64)]
            case 4:
                made[place:place] = dice.randbytes(dice.randint(1, 64))
            case _:
                start = dice.randrange(max(1, reach))
                made[place : place + 32] = made[start : start + 32]
    return bytes(made)


def refusals(file: Path, seeds: range) -> int:
    """How many of the damaged copies of `file` are refused. Anything but a sentence fails."""
    return _refusals(file, seeds, lambda spoiled: folder_contents(read_checkpoint((spoiled,))))


def products(file: Path, seeds: range) -> int:
    """How many of them become matrices that our kernels multiply by; the others are refused."""
    return len(seeds) - _refusals(file, seeds, _multiply_all)


def _refusals(file: Path, seeds: range, use: Callable[[Path], object]) -> int:
    data, refused = file.read_bytes(), 0
    spoiled = file.with_name("damaged.gguf")
    for seed in seeds:
        spoiled.write_bytes(damaged(data, seed))
        try:
            use(spoiled)
        except ConfigError as error:
            sentence = str(error)
            assert str(spoiled) in sentence and len(sentence) < 1000, (seed, sentence)
            refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
    return refused


def _multiply_all(file: Path) -> None:
    with patch.object(gguf_source, "open_checkpoint", lambda _: read_checkpoint((file,))):
        source = gguf_source.GgufSource(file.parent, torch.float32, torch.device("cpu"))
    for name in source.names():
        _multiply(source, name)


def _multiply(source: gguf_source.GgufSource, name: str) -> None:
    plain = source.read(name)
    if plain.dim() != 2 or not plain.numel():
        return
    outputs, inputs = plain.shape
    piece = MatrixSlice(name.removesuffix(".weight"), outputs, inputs, 0, 0, outputs)
    groups = source.quantized(piece)
    x = torch.ones(2, inputs)
    if groups is not None and has_kernel(groups):
        kernel = GroupedKernel([groups], None)
        kernel(x)
        kernel.rows(torch.tensor([0, outputs - 1]), x)
    else:
        NativeKernel(plain, None)(x.to(plain.dtype))


def peak_bytes(file: Path) -> int:
    """What reading takes of memory at most, as Python counts it."""
    tracemalloc.start()
    try:
        folder_contents(read_checkpoint((file,)))
    except ConfigError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak
