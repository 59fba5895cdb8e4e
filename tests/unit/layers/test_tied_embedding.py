"""A matrix that embedding and output head share, on CPU: one copy, in panels, the same bits."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.model_config import ModelConfig
from engine.device.distributed import ParallelState
from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from engine.layers.embedding_table import PackedTable, RowTable
from engine.layers.fused_ops import CpuOps
from engine.layers.linear_kernel import NativeKernel
from engine.layers.weight_format import NativeFormat
from engine.layers.weights import DummySource
from engine.models.llama import EMBEDDING, LlamaModel
from engine.models.loader import load_model
from engine.worker.sizing.estimate import stage_weight_bytes
from tests.support.kernels import TYPES, load_kernels, same_bits, torch_threads
from tests.support.models import changed, make_config, make_model
from tests.support.step_driver import StepDriver, make_runner

CPU = torch.device("cpu")
SINGLE = ParallelState.single()
CARRIED = Path(__file__).parents[3] / "models" / "manta-small"
WITH_TYPES = pytest.mark.parametrize("dtype", TYPES, ids=str)


@pytest.fixture(autouse=True)
def kernels() -> Any:
    return load_kernels()


class WatchedSource(DummySource):
    """Knows whether what it has read last under each name is still in memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(0, dtype, CPU)
        self.format = NativeFormat()
        self.read: dict[str, list[weakref.ref[Tensor]]] = {}

    def get(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        tensor = super().get(name, *args, **kwargs)
        self.read.setdefault(name, []).append(weakref.ref(tensor))
        return tensor


def tensors_as_large_as(num_bytes: int) -> set[int]:
    """Addresses of the tensors in this process that take at least so much."""
    gc.collect()
    return {
        found.data_ptr()
        for found in gc.get_objects()
        if issubclass(type(found), Tensor) and found.device == CPU and found.nbytes >= num_bytes
    }


@WITH_TYPES
def test_the_matrix_is_held_once_and_in_panels(dtype: torch.dtype) -> None:
    """The rows as they were read are gone before the first layer is read."""
    config = ModelConfig.from_pretrained(CARRIED)
    size = config.vocab_size * config.hidden_size * dtype.itemsize
    before, source = tensors_as_large_as(size), WatchedSource(dtype)
    alive: list[bool] = []
    model = LlamaModel(config, dtype, CPU, SINGLE, 64, CpuOps())
    model.load(source, lambda *_: alive.extend(ref() is not None for ref in source.read[EMBEDDING]))
    assert alive == [False] * config.num_layers, "read once, and released"
    assert model.head is not None and model.embedding is not None
    kernel, table = model.head.kernel, model.embedding.table
    assert type(kernel) is NativeKernel and type(table) is PackedTable
    assert table.kernel is kernel
    assert tensors_as_large_as(size) - before == {kernel.packed.data_ptr()}
    assert kernel.packed.nbytes == size  # the vocabulary is a multiple of the panel


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_have_the_bits_of_a_head_of_its_own(tmp_path: Path, dtype: str) -> None:
    """A checkpoint that is tied, and the same one with the matrix twice: prompts and decodes."""
    tied = make_model(tmp_path / "tied", "Qwen3ForCausalLM", head_dim=16, tie_word_embeddings=True)
    own = make_model(tmp_path / "own", "Qwen3ForCausalLM", head_dim=16)
    weights = load_file(tied / "model.safetensors")
    assert "lm_head.weight" not in weights
    save_file({**weights, "lm_head.weight": weights[EMBEDDING].clone()}, own / "model.safetensors")
    found: list[list[Any]] = []
    for folder in (tied, own):
        runner = make_runner(str(folder), attention_backend="cpu", dtype=dtype)
        table = PackedTable if folder is tied else RowTable
        assert runner.model.embedding is not None and type(runner.model.embedding.table) is table
        driver = StepDriver(runner)
        reqs = [driver.add(list(range(start, start + 17))) for start in (3, 99, 190)]
        steps = [driver.run([(req, 17) for req in reqs], [], prompt_logits=True)]
        for token in (210, 0, 63, 64):
            for req in reqs:
                req.tokens.append(token)
            steps.append(driver.run([], reqs))
        assert all(logits is not None for logits, _ in steps)
        found.append([part for logits, rows in steps for part in (logits, *rows)])
    assert len(found[0]) == 5 + 3
    for shared, separate in zip(*found, strict=True):
        assert same_bits(shared, separate)


@WITH_TYPES
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_ranks_look_up_their_rows(
    dtype: torch.dtype, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """211 tokens: the last rank of several has padding, and zeros for the others' tokens."""
    monkeypatch.setattr(ParallelState, "all_reduce", lambda _, tensor: tensor)
    source = WatchedSource(dtype)
    matrix = source.get(EMBEDDING, (211, 32))
    ids = torch.cat([torch.arange(211), torch.tensor([210, 0, 7, 7, 106, 105])])
    total = torch.zeros(len(ids), 32, dtype=dtype)
    for rank in range(tp_size):
        parallel = ParallelState(rank, tp_size, 0, 1)
        embedding = VocabParallelEmbedding(211, 32, parallel)
        embedding.load_tied(source, EMBEDDING, ParallelLMHead(211, 32, parallel), EMBEDDING)
        assert isinstance(embedding.table, PackedTable)
        part = embedding(ids)
        with torch_threads(2):
            assert same_bits(embedding(ids), part)
        rows = -(-211 // tp_size)
        mine = (ids >= rank * rows) & (ids < (rank + 1) * rows)
        assert same_bits(part[mine], matrix[ids[mine]]) and not part[~mine].any()
        total += part
    assert torch.equal(total, matrix[ids])


def test_tokens_that_do_not_exist() -> None:
    embedding = VocabParallelEmbedding(211, 32, SINGLE)
    embedding.load_tied(
        WatchedSource(torch.float32), EMBEDDING, ParallelLMHead(211, 32, SINGLE), EMBEDDING
    )
    assert embedding(torch.tensor([], dtype=torch.int64)).shape == (0, 32)
    for wrong in (-1, 211, 255, 256):
        with pytest.raises(RuntimeError, match=rf"{wrong}, not in \[0, 211\)"):
            embedding(torch.tensor([3, wrong]))


def test_stages_of_a_pipeline_have_a_matrix_each() -> None:
    """The first one looks up rows, the last one multiplies."""
    config = make_config(CARRIED, attention_backend="cpu", load_format="dummy")
    first, last = (ParallelState(0, 1, rank, 2) for rank in (0, 1))
    stage = load_model(config, first, CPU)
    assert stage.embedding is not None and isinstance(stage.embedding.table, RowTable)
    assert stage.head is None
    stage = load_model(config, last, CPU)
    assert stage.head is not None and isinstance(stage.head.kernel, NativeKernel)
    assert stage.embedding is None


def test_the_estimate_counts_it_once() -> None:
    config = make_config(CARRIED, attention_backend="cpu")
    untied = changed(config, model=replace(config.model, tie_word_embeddings=False))
    matrix = config.model.vocab_size * config.model.hidden_size * 4
    assert stage_weight_bytes(untied, SINGLE) - stage_weight_bytes(config, SINGLE) == matrix
