"""Blocks of GGUF files are dequantized to the last bit as the `gguf` package does it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.checkpoint.gguf.folder import model_folder
from engine.checkpoint.gguf.tensor_types import TENSOR_TYPES
from engine.errors import ConfigError
from engine.layers.gguf_blocks import grouped_of
from engine.layers.gguf_source import GgufSource
from engine.layers.grouped import Grouped
from engine.layers.weight_format import MatrixSlice
from tests.support.gguf_files import keep_folders_in, write_gguf
from tests.support.models import make_model

CPU = torch.device("cpu")
QUANTIZED = [number for number, kind in TENSOR_TYPES.items() if not kind.is_plain]
ROWS, COLUMNS = 7, 1024


def random_blocks(number: int, seed: int = 0) -> np.ndarray:
    """Random bytes [ROWS, row bytes]; also with scales that aren't finite."""
    kind = TENSOR_TYPES[number]
    size = COLUMNS // kind.block_numbers * kind.block_bytes
    return np.random.default_rng(seed).integers(0, 256, (ROWS, size), np.uint8)


@pytest.mark.parametrize("number", QUANTIZED)
def test_each_bit_is_right(number: int) -> None:
    kind = TENSOR_TYPES[number]
    for seed in range(20):
        blocks = random_blocks(number, seed)
        with np.errstate(all="ignore"):
            wanted = gguf.quants.dequantize(blocks, Kind(number))
        grouped = grouped_of(kind, torch.from_numpy(blocks))
        found = grouped.dequantize(torch.float32).numpy()
        assert np.array_equal(found, wanted, equal_nan=True)
        assert grouped.shape == (ROWS, COLUMNS)
        assert grouped.numbers.dtype == torch.uint8 and grouped.scales.dtype == torch.float16
        assert int(grouped.numbers.max()) < 2**grouped.bits


NAME = "model.layers.0.mlp.down_proj"
SHAPE = (256, 512)


@pytest.fixture(params=[Kind.Q8_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K, Kind.BF16])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> GgufSource:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    model = make_model(tmp_path / "model", "LlamaForCausalLM", vocab_size=300, **sizes)
    write_gguf(tmp_path / "model.gguf", model, request.param)
    with pytest.MonkeyPatch.context() as patch:
        keep_folders_in(tmp_path / "made", patch)
        return GgufSource(model_folder(tmp_path / "model.gguf"), torch.float32, CPU)


def test_slices(source: GgufSource) -> None:
    """Rows, columns, and columns that cut through blocks are those of the whole."""
    whole = source.read(f"{NAME}.weight").float()
    assert whole.shape == SHAPE
    for dim, start, count in ((0, 3, 200), (1, 0, 256), (1, 256, 256), (1, 37, 99), (1, 500, 12)):
        part = source.get(f"{NAME}.weight", SHAPE, dim=dim, start=start, count=count)
        assert torch.equal(part, whole.narrow(dim, start, count))
    bfloat16 = GgufSource(source.folder, torch.bfloat16, CPU)
    assert torch.equal(bfloat16.get(f"{NAME}.weight", SHAPE), whole.bfloat16())
    query = "model.layers.0.self_attn.q_proj.weight"  # whose rows lie in another order
    rotated = source.read(query).float()
    assert torch.equal(source.get(query, (256, 256), start=70, count=90), rotated[70:160])
    assert torch.equal(source.get(query, (256, 256), dim=1, start=3, count=40), rotated[:, 3:43])


def test_groups(source: GgufSource) -> None:
    """What is had in groups is the same; a part that cuts through a block isn't had so."""
    is_plain = source.read(f"{NAME}.weight").dtype == torch.bfloat16
    for name, shape in ((NAME, SHAPE), ("model.layers.0.self_attn.k_proj", (128, 256))):
        for dim, start, count in ((0, 0, 128), (0, 5, 100), (1, 0, 256)):
            part = MatrixSlice(name, *shape, dim, start, count)
            grouped = source.quantized(part)
            assert (grouped is None) == is_plain
            if grouped is not None:
                wanted = source.get(f"{name}.weight", shape, dim=dim, start=start, count=count)
                assert torch.equal(grouped.dequantize(torch.float32), wanted)
    assert source.quantized(MatrixSlice(NAME, *SHAPE, 1, 16, 256)) is None
    assert source.quantized(MatrixSlice("model.norm", 1, 256, 0, 0, 1)) is None


def test_little_is_dequantized_at_once(source: GgufSource, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sizes = source.read(f"{NAME}.weight"), []
    dequantize = Grouped.dequantize

    def noting(self: Grouped, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(self.numbers.numel())
        return dequantize(self, dtype)

    monkeypatch.setattr("engine.layers.gguf_source.CHUNK_NUMBERS", 10 * SHAPE[1])
    monkeypatch.setattr(Grouped, "dequantize", noting)
    assert torch.equal(source.read(f"{NAME}.weight"), whole)
    if whole.dtype == torch.float32:
        assert max(sizes) == 10 * SHAPE[1] and sum(sizes) == whole.numel()


def test_another_shape_and_no_weight(source: GgufSource) -> None:
    with pytest.raises(ConfigError, match=r"has shape \[256, 512\]"):
        source.get(f"{NAME}.weight", (512, 256))
    with pytest.raises(ConfigError, match=r"lacks the weight 'model\.nothing'"):
        source.read("model.nothing")
    assert source.holds(f"{NAME}.weight") and not source.holds("model.nothing")
