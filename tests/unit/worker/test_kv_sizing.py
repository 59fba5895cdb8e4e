"""The KV cache's size from measured memory, and what is said when there is too little."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.forward_batch import step_inputs
from engine.config import EngineConfig, WorkerConfig
from engine.device.distributed import ParallelState
from engine.device.memory import CudaMemory, DeviceProcess, parse_processes
from engine.errors import ConfigError
from engine.memory_need import GRAPH_RESERVE_BYTES, HEADROOM_BYTES, CacheSize, max_step_tokens
from engine.protocol.sampling_params import MAX_LOGPROBS
from engine.protocol.step import ModelWorkerBatch
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.speculative.config import SpeculativeConfig
from engine.worker import auto_config, model_runner, tp_worker
from engine.worker.auto_config import make_worker_config
from engine.worker.sizing.estimate import stage_weight_bytes
from engine.worker.sizing.kv_sizing import MemoryMeter, agree_on_kv_tokens, check_weights_fit
from engine.worker.sizing.memory_profile import MemoryProfile
from engine.worker.sizing.out_of_memory import ALLOCATE, PROFILE, WEIGHTS, out_of_memory_advice
from engine.worker.sizing.profile_steps import largest_steps
from engine.worker.tp_worker import TpModelWorker
from tests.support.fake_memory import GIB, FakeMemory
from tests.support.models import changed

SINGLE = ParallelState.single()
CPU = torch.device("cpu")
PROFILE_80 = MemoryProfile(
    total=80 * GIB,
    fraction=0.9,
    elsewhere=1 * GIB,
    weights=15 * GIB,
    buffers=1 * GIB,
    activations=2 * GIB,
    libraries=GIB // 2,
    graphs=1 * GIB,
    headroom=1 * GIB,
    cache=CacheSize(((128 * 1024, 0),)),
)


def make_config(**changes: Any) -> WorkerConfig:
    """Of the carried model on CPU, its KV cache not yet sized."""
    values: dict[str, Any] = dict(
        device="cpu", max_model_len=96, max_running_requests=6, chunked_prefill_size=32, page_size=4
    )
    config = make_worker_config(EngineConfig(**{**values, **changes}).resolve())
    return dataclasses.replace(config, num_kv_tokens=changes.get("max_total_tokens"))


def make_meter(kv_bytes: int, config: WorkerConfig) -> MemoryMeter:
    """One that finds `kv_bytes` left: 3 GiB of weights, 1 of buffers, 2 of activations."""
    rest = (3 + 1 + 2) * GIB + GRAPH_RESERVE_BYTES + HEADROOM_BYTES
    size = int((kv_bytes + rest) / config.engine.memory_fraction) + 1
    memory = FakeMemory(stages=[3 * GIB, 4 * GIB, 6 * GIB], highest=6 * GIB, size=size)
    return MemoryMeter(memory)


# Arithmetic


def test_what_is_left_is_for_tokens() -> None:
    assert PROFILE_80.kv_bytes == 72 * GIB - (15 + 1 + 2 + 1 + 1) * GIB - GIB // 2
    assert PROFILE_80.kv_tokens == PROFILE_80.kv_bytes // (128 * 1024)
    line = PROFILE_80.describe(1000 * 8)
    for words in ("80.00 GiB", "weights 15.00", "activations 2.00", "graphs 1.00", "headroom 1.00"):
        assert words in line
    assert "KV cache 0.98 GiB = 8000 tokens" in line and "\n" not in line


def test_others_on_the_device_count_once_they_reach_into_the_share() -> None:
    few = dataclasses.replace(PROFILE_80, elsewhere=8 * GIB)
    many = dataclasses.replace(PROFILE_80, elsewhere=30 * GIB)
    assert few.kv_bytes == PROFILE_80.kv_bytes
    assert many.kv_bytes == PROFILE_80.kv_bytes - 22 * GIB
    assert dataclasses.replace(PROFILE_80, elsewhere=79 * GIB).kv_tokens == 0


def test_cuda_memory_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of torch's functions, with which part of their answers."""
    device = torch.device("cuda", 0)
    asked: list[str] = []
    for name, answer in {
        "mem_get_info": (30, 80),
        "memory_allocated": 20,
        "memory_reserved": 25,
        "max_memory_allocated": 24,
        "reset_peak_memory_stats": None,
        "synchronize": None,
    }.items():

        def call(of: torch.device, name: str = name, answer: Any = answer) -> Any:
            assert of == device
            asked.append(name)
            return answer

        monkeypatch.setattr(torch.cuda, name, call)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty_cache"))
    memory = CudaMemory(device)
    assert (memory.total(), memory.free(), memory.elsewhere()) == (80, 30, 25)
    assert (memory.allocated(), memory.reserved(), memory.peak()) == (20, 25, 24)
    asked.clear()
    memory.reset_peak()
    memory.release()
    assert asked == ["reset_peak_memory_stats", "synchronize", "empty_cache"]

    def broken(device: torch.device) -> str:
        raise TypeError("unsupported operand: the driver tells no sizes here")

    monkeypatch.setattr(torch.cuda, "list_gpu_processes", broken)
    assert memory.other_processes() == []


# The steps


@given(
    chunk=st.integers(-1, 100),
    prefill=st.integers(1, 200),
    rows=st.integers(1, 50),
    length=st.integers(2, 150),
)
def test_steps_have_the_shapes_that_they_say(
    chunk: int, prefill: int, rows: int, length: int
) -> None:
    engine = EngineConfig(
        chunked_prefill_size=chunk,
        max_prefill_tokens=prefill,
        max_running_requests=rows,
        page_size=1,
    )
    tokens = max_step_tokens(engine, length)
    assert tokens >= max(chunk, rows + 1) and (chunk > 0 or tokens >= max(prefill, length))
    config = changed(BASE, max_step_tokens=tokens, max_model_len=length, max_running_requests=rows)
    long, wide = largest_steps(config)
    assert int(long.seq_lens[0]) == length and len(long.input_ids) == min(tokens, length)
    assert long.next_prompt_ids is not None
    assert long.new_rows[0].params.prompt_logprobs == MAX_LOGPROBS
    assert len(wide.sampled_lines) == min(rows, tokens)
    assert len(wide.input_ids) == min(tokens, rows * length)
    for batch in (long, wide):
        assert int(batch.query_lens.sum()) == len(batch.input_ids) == len(batch.out_cache_loc)
        assert batch.query_lens.min() > 0 and batch.seq_lens.max() <= length
        assert not batch.out_cache_loc.any(), "only the padding page exists"


BASE = make_config()


def test_rows_have_adapters_where_requests_may(tmp_path: Path) -> None:
    for step in largest_steps(changed(BASE, lora_load_folders=[str(tmp_path)])):
        assert step.adapters is not None
        assert step.adapters.tolist() == [0] * len(step.query_lens)
    assert all(step.adapters is None for step in largest_steps(BASE))


def test_profile_runs_the_steps_and_reads_the_meters() -> None:
    seen: list[ModelWorkerBatch] = []
    config = changed(BASE, memory_fraction=1.0)
    memory = FakeMemory(stages=[3 * GIB, 5 * GIB], highest=9 * GIB, outside=[1 * GIB, 3 * GIB])
    meter = MemoryMeter(memory, graph_bytes=2 * GIB)
    meter.loaded()

    class Runs:
        def forward(self, batch: ModelWorkerBatch) -> None:
            assert memory.resets == 1
            seen.append(batch)

    profile = meter.profile(Runs(), config, 1024)  # type: ignore[arg-type]
    assert [batch.step for batch in seen] == [0, 1]
    assert (profile.weights, profile.buffers) == (3 * GIB, 2 * GIB)
    assert (profile.activations, profile.libraries) == (4 * GIB, 2 * GIB)
    assert (profile.elsewhere, profile.graphs, profile.headroom) == (GIB, 2 * GIB, HEADROOM_BYTES)
    assert profile.kv_bytes == (79 - 3 - 2 - 4 - 2 - 2 - 1) * GIB


# A worker


def test_worker_takes_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config()
    per_token = 4096  # float32: 2 x 4 layers x 2 heads x 64 values
    meter = make_meter(403 * per_token, config)
    with caplog.at_level(logging.INFO, "engine.worker.sizing.kv_sizing"):
        worker = TpModelWorker(config, SINGLE, None, meter)
    assert worker.runner.kv_bytes_per_token == per_token
    assert worker.num_kv_tokens == worker.runner.kv_pool.num_slots == 400
    [line] = [r.getMessage() for r in caplog.records if "KV cache" in r.getMessage()]
    assert "weights 3.00 GiB" in line and "400 tokens" in line
    resolved = EngineConfig(max_model_len=96).resolve()
    assert SchedulerConfig(resolved, worker.num_kv_tokens).num_kv_tokens == 400


def test_worker_takes_no_more_than_can_be_used() -> None:
    config = make_config()
    worker = TpModelWorker(config, SINGLE, None, make_meter(4 * GIB, config))
    assert worker.num_kv_tokens == config.max_kv_tokens == 6 * 96


def test_profiled_worker_computes_like_any_other() -> None:
    from tests.support.step_driver import StepDriver

    def tokens(worker: TpModelWorker) -> list[int]:
        driver = StepDriver(worker.runner)
        req = driver.add([5, 9, 100, 7, 8])
        logits = [driver.run([(req, 5)], [])[0]]
        for _ in range(6):
            last = logits[-1]
            assert last is not None
            req.tokens.append(int(last.argmax()))
            logits.append(driver.run([], [req])[0])
        return req.tokens

    config = make_config(max_total_tokens=400)
    measured = TpModelWorker(config, SINGLE, None, make_meter(4 * GIB, config))
    assert measured.num_kv_tokens == 400
    assert tokens(measured) == tokens(TpModelWorker(config, SINGLE))


def test_stated_size_that_does_not_fit_is_refused() -> None:
    config = make_config(max_total_tokens=400)
    with pytest.raises(ConfigError) as caught:
        TpModelWorker(config, SINGLE, None, make_meter(300 * 4096, config))
    for words in ("max_total_tokens (400)", "room for 300 tokens", "memory_fraction (now 0.85)"):
        assert words in str(caught.value)


def test_room_below_one_request_is_refused() -> None:
    config = make_config()
    with pytest.raises(ConfigError) as caught:
        TpModelWorker(config, SINGLE, None, make_meter(90 * 4096, config))
    for words in ("room for 88 tokens", "max_model_len (96)", "weights 3.00 GiB"):
        assert words in str(caught.value)


def test_unknown_size_needs_a_meter() -> None:
    with pytest.raises(ValueError, match="meter"):
        TpModelWorker(make_config(), SINGLE)


def test_ranks_agree_on_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ParallelState(1, 2, 0, 1)
    monkeypatch.setattr(ParallelState, "min_over_ranks", lambda self, value, device: 402)
    tokens = agree_on_kv_tokens(PROFILE_80, make_config(), state, CPU)
    assert tokens == 400


def test_cuda_leaves_the_size_to_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_config, "detect_device", lambda: "cuda")
    config = make_worker_config(EngineConfig(device="auto", max_running_requests=3).resolve())
    assert (config.device, config.num_kv_tokens) == ("cuda", None)
    assert config.max_kv_tokens == 3 * config.max_model_len
    stated = EngineConfig(device="cuda", max_total_tokens=1001).resolve()
    assert make_worker_config(stated).num_kv_tokens == 992


# Advice


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (WEIGHTS, ["loading the weights", "tp_size (now 1)", "pp_size (now 1)", "smaller model"]),
        (PROFILE, ["chunked_prefill_size", "max_running_requests (now 6)", "max_model_len (now"]),
        (ALLOCATE, ["memory_fraction (now 0.85)", "max_model_len (now 96)", "tp_size"]),
    ],
)
def test_out_of_memory_becomes_advice(phase: str, words: list[str]) -> None:
    others = [DeviceProcess(4711, 30 * GIB)]
    memory = FakeMemory(stages=[40 * GIB], outside=[31 * GIB], others=others)
    with pytest.raises(ConfigError) as caught, out_of_memory_advice(phase, make_config(), memory):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")
    text = str(caught.value)
    for word in [*words, "80.00 GiB", "40.00 GiB", "process 4711 holds 30.00 GiB"]:
        assert word in text, text
    assert "\n" not in text


def test_libraries_that_find_no_memory_are_understood() -> None:
    config, memory = make_config(), FakeMemory(outside=[20 * GIB])
    with (
        pytest.raises(ConfigError, match="nvidia-smi"),
        out_of_memory_advice(PROFILE, config, memory),
    ):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    with (
        pytest.raises(RuntimeError, match="something else"),
        out_of_memory_advice(PROFILE, config, memory),
    ):
        raise RuntimeError("something else")
    with pytest.raises(torch.OutOfMemoryError), out_of_memory_advice(PROFILE, config, None):
        raise torch.OutOfMemoryError("on CPU nothing can be measured")


def test_stated_size_is_named_when_allocating_fails() -> None:
    config = make_config(max_total_tokens=400)
    stated = r"lower max_total_tokens \(now 400\)"
    advised = out_of_memory_advice(ALLOCATE, config, FakeMemory())
    with pytest.raises(ConfigError, match=stated), advised:
        raise torch.OutOfMemoryError("no")


@pytest.mark.parametrize(
    ("owner", "target"), [(model_runner, "load_model"), (MemoryMeter, "profile")]
)
def test_worker_start_says_what_to_change(
    owner: object, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(owner, target, fail)
    config = make_config()
    with pytest.raises(ConfigError, match="Change one of"):
        TpModelWorker(config, SINGLE, None, make_meter(4 * GIB, config))


def test_weights_that_cannot_fit_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(tp_worker, "ModelRunner", read)
    config = make_config(memory_fraction=1.0)
    needed = stage_weight_bytes(config, SINGLE)
    memory = FakeMemory(size=needed)
    with pytest.raises(ConfigError, match=r"may be used \(memory_fraction 0.85\)"):
        check_weights_fit(needed, make_config(), memory)
    check_weights_fit(needed, config, memory)
    memory.size -= 1
    with pytest.raises(ConfigError, match="this rank's weights take"):
        TpModelWorker(config, SINGLE, None, MemoryMeter(memory))


def test_weights_are_counted_as_loaded() -> None:
    config = make_config()
    folder = Path(config.model.path)
    stored = np.frombuffer((folder / "model.safetensors").read_bytes()[:8], np.uint64)[0]
    data = (folder / "model.safetensors").stat().st_size - 8 - int(stored)
    as_float32 = 2 * data  # stored as bfloat16
    assert stage_weight_bytes(config, SINGLE) == pytest.approx(as_float32, rel=0.01)
    halves = [stage_weight_bytes(config, ParallelState(0, 2, stage, 2)) for stage in (0, 1)]
    table = config.model.vocab_size * config.model.hidden_size * 4
    assert 2 * sum(halves) == stage_weight_bytes(config, SINGLE) + table


def test_processes_of_the_driver_are_read() -> None:
    text = "GPU:0\nprocess      12345 uses     1024.000 MB GPU memory\nprocess   7 uses  2.500 MB"
    assert parse_processes(text, 7) == [DeviceProcess(12345, GIB)]
    assert parse_processes("pynvml module not found, please install nvidia-ml-py", 1) == []


def test_steps_with_drafts_are_profiled() -> None:
    """Every draft of every row has logits."""
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    *_, last = largest_steps(changed(BASE, speculative_config=drafts, max_running_requests=5))
    assert len(step_inputs(last).logits_rows) == 25
    assert last.line_starts()[-1] == 25
