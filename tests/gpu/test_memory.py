"""The KV cache's size and the weights' way onto a real GPU."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig, WorkerConfig
from engine.device.distributed import ParallelState
from engine.device.memory import CudaMemory
from engine.errors import ConfigError
from engine.layers.weights import SafetensorsSource
from engine.worker.auto_config import make_worker_config
from engine.worker.factory import make_worker
from engine.worker.tp_worker import TpModelWorker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODEL = Path(__file__).resolve().parents[2] / "models" / "manta-small"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def make_config(**changes: object) -> WorkerConfig:
    values = {"device": "cuda", "max_running_requests": 2048, **changes}
    return make_worker_config(EngineConfig.model_validate(values).resolve())


def start(config: WorkerConfig) -> TpModelWorker:
    worker = make_worker(config, ParallelState.single(), None)  # type: ignore[arg-type]
    assert isinstance(worker, TpModelWorker)
    return worker


def test_kv_cache_takes_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    memory = CudaMemory(torch.device("cuda", 0))
    # As many requests as it takes for the GPU to be the limit.
    config = dataclasses.replace(make_config(), max_kv_tokens=2**31)
    with caplog.at_level(logging.INFO, "engine.worker.sizing.kv_sizing"):
        worker = start(config)
    [line] = [r.getMessage() for r in caplog.records if "KV cache" in r.getMessage()]
    print(line)
    limit = config.engine.memory_fraction * memory.total()
    used = memory.total() - memory.free()
    assert used < limit, "more was taken than memory_fraction allows"
    assert worker.num_kv_tokens * worker.runner.kv_bytes_per_token > limit / 2
    # Graphs, activations and headroom are still free.
    assert memory.free() > memory.total() - limit


def test_stated_size_beyond_the_memory_is_refused() -> None:
    config = dataclasses.replace(make_config(), num_kv_tokens=2**29)
    with pytest.raises(ConfigError, match="room for"):
        start(config)


def test_running_out_of_memory_is_advice() -> None:
    memory = CudaMemory(torch.device("cuda", 0))
    hog = torch.empty(memory.free() - (256 << 20), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(ConfigError, match=r"Change one of|has room for"):
            start(make_config(max_running_requests=512))
    finally:
        hog.set_()  # a failure's traceback would hold its memory


def test_weights_go_straight_to_the_device() -> None:
    source = SafetensorsSource(MODEL, torch.bfloat16, torch.device("cuda"))
    host = SafetensorsSource(MODEL, torch.bfloat16, torch.device("cpu"))
    name, shape = "model.layers.0.mlp.down_proj.weight", (256, 1024)
    for options in ({}, {"start": 64, "count": 64}, {"dim": 1, "start": 256, "count": 512}):
        part = source.get(name, shape, **options)  # type: ignore[arg-type]
        assert part.is_cuda and part.is_contiguous()
        assert torch.equal(part.cpu(), host.get(name, shape, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
def test_nccl_layouts_give_the_tokens_of_one_gpu(tp_size: int, pp_size: int) -> None:
    if torch.cuda.device_count() < tp_size * pp_size:
        pytest.skip(f"needs {tp_size * pp_size} GPUs")
    prompts = [[5 + i, 9, 100, 7 * i + 3] * 8 for i in range(8)]
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    tokens = []
    for layout in ({}, {"tp_size": tp_size, "pp_size": pp_size}):
        with LLM(
            str(MODEL), device="cuda", dtype="float32", max_total_tokens=8192, **layout
        ) as llm:
            results = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([r.outputs[0].token_ids for r in results])
    assert tokens[0] == tokens[1]
