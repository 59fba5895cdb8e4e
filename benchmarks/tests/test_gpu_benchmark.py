"""benchmarks/gpu.py: its formulas, its criteria, and all of it once with a tiny shape on CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_bench import engine_runs
from benchmarks.gpu_bench.bare import bare_decode
from benchmarks.gpu_bench.engine_runs import EngineRuns
from benchmarks.gpu_bench.shapes import LLAMA_1B, LLAMA_8B, QUICK, TINY, CardRates, ModelShape
from engine.config import WorkerConfig
from engine.device.distributed import ParallelState
from engine.executor.in_process import InProcessExecutor
from engine.trace import TraceRing
from engine.worker.step_queue import StepQueue
from engine.worker.tp_worker import TpModelWorker
from tests.support.fake_graphs import CapturableAttention, RecordedGraphs, use_capturable_attention

H100 = CardRates(bytes_per_s=3.0e12, flop_per_s=798e12)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("shape", "weights_gb", "kv_kib"), [(LLAMA_8B, 15.01, 128), (LLAMA_1B, 2.47, 32)]
)
def test_sizes_of_the_shapes(shape: ModelShape, weights_gb: float, kv_kib: int) -> None:
    assert shape.weight_bytes / 1e9 == pytest.approx(weights_gb, abs=0.005)
    assert shape.kv_bytes_per_token == kv_kib * 1024


@pytest.mark.parametrize(
    ("shape", "decode_ms", "prefill_ms"),
    [
        (LLAMA_8B, {1: 5.05, 64: 7.87, 256: 16.46}, {1024: 18.3, 8192: 165}),
        (LLAMA_1B, {1: 0.84, 64: 1.54, 256: 3.69}, {1024: 2.6, 8192: 25.5}),
    ],
)
def test_rooflines(
    shape: ModelShape, decode_ms: dict[int, float], prefill_ms: dict[int, float]
) -> None:
    for batch, wanted in decode_ms.items():
        assert shape.decode_s(batch, 1024, H100) * 1e3 == pytest.approx(wanted, rel=0.01)
    for tokens, wanted in prefill_ms.items():
        assert shape.prefill_s(tokens, H100) * 1e3 == pytest.approx(wanted, rel=0.01)
    # Without context the products bind once a row costs more than its share of the weights.
    assert shape.decode_s(266, 0, H100) == pytest.approx(shape.decode_s(1, 0, H100), rel=0.01)
    assert shape.decode_s(532, 0, H100) == pytest.approx(2 * shape.decode_s(1, 0, H100), rel=0.01)
    # Two waves of all requests cost what the parts cost.
    steps = 255 * 2 * shape.decode_s(256, 384, H100)
    assert shape.serving_s(512, 256, 256, 256, H100) == pytest.approx(
        steps + 512 * shape.prefill_s(256, H100)
    )


def row(model: str, batch: int, **figures: float | int | None) -> gpu.Row:
    wanted = {"over_bare": 1.1, "over_roofline": 1.3, "wall_ms": 1.2, "bare_graph_size": batch}
    return {"model": model, "batch": batch, **wanted, **figures}


@pytest.mark.parametrize(
    ("figures", "passed"),
    [
        ({}, [True, True]),
        ({"over_bare": 1.16}, [False, True]),
        ({"over_roofline": 1.36}, [True, False]),
        ({"bare_graph_size": None}, [False, True]),
    ],
)
def test_criteria_of_8b(figures: dict[str, float | int | None], passed: list[bool]) -> None:
    report = gpu.Report(420.0)
    # Other batches are reported and not judged.
    report.decode = [row("8b", 64, **figures), row("8b", 1, over_bare=9.0, over_roofline=9.0)]
    assert [c.passed for c in gpu.judge([LLAMA_8B], report)] == passed


def test_criteria_of_1b_and_of_what_was_not_measured() -> None:
    report = gpu.Report(420.0)
    report.decode = [row("1b", 1, wall_ms=1.5)]
    assert [c.passed for c in gpu.judge([LLAMA_1B], report)] == [True]
    report.decode = [row("1b", 1, wall_ms=1.51)]
    assert [c.passed for c in gpu.judge([LLAMA_1B], report)] == [False]
    assert [(c.value, c.passed) for c in gpu.judge([LLAMA_8B], report)] == [(None, False)] * 2
    assert gpu.judge([TINY], report) == []


def test_a_spent_budget_drops_the_rest(tmp_path: Path) -> None:
    report = gpu.Report(10.0)
    assert report.has_time("something")
    report.started_at -= 11.0
    cpu = torch.device("cpu")
    gpu.measure_engine(TINY, QUICK, H100, report, tmp_path, cpu, {})
    assert report.engines == {} and report.decode == []
    assert len(report.notes) == 1 and "not measured" in report.notes[0]


def test_an_engine_that_does_not_fit_is_noted(tmp_path: Path) -> None:
    report = gpu.Report(60.0)
    options = {"max_total_tokens": "64"}
    gpu.measure_engine(TINY, QUICK, H100, report, tmp_path, torch.device("cpu"), options)
    assert report.engines == {} and "max_total_tokens" in report.notes[0]


def test_the_script_on_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--quick", "--device", "cpu", "--set", "page_size=8"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["ok"] and figures["notes"] == []
    assert figures["engines"]["tiny"]["page_size"] == 8
    assert [r["batch"] for r in figures["decode"]] == list(QUICK.batches)
    for decode in figures["decode"]:
        # The mean over the steps that count.
        assert decode["context"] == pytest.approx(QUICK.context, abs=2)
        assert 0 < decode["busy"] <= 1 and 0 < decode["overlap_off_busy"] <= 1
        assert decode["wall_ms"] > 0 and decode["bare_ms"] > 0 and decode["overlap_off_wall_ms"] > 0
    assert [r["transformers_ms"] is not None for r in figures["decode"]] == [True, False]
    assert [r["tokens"] for r in figures["prefill"]] == list(QUICK.prompts)
    assert [r["overlap"] for r in figures["serving"]] == [True, False]
    assert all(0 < r["busy"] <= 1 for r in figures["serving"])


def test_a_failure_loses_no_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(gpu, "measure_peer", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        gpu.main(["--quick", "--device", "cpu"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not figures["ok"] and "the device is gone" in figures["notes"][0]
    assert len(figures["decode"]) == len(QUICK.batches)


class GraphExecutor(InProcessExecutor):
    """Decodes are captured, by `RecordedGraphs`."""

    def __init__(self, config: WorkerConfig) -> None:
        self.trace = TraceRing()
        self.backend = RecordedGraphs()
        self.worker = TpModelWorker(
            replace(config, cuda_graph_max_batch_size=4),
            ParallelState.single(),
            self.trace,
            graph_backend=self.backend,
        )
        self.num_kv_tokens = self.worker.num_kv_tokens
        self._steps = StepQueue(self.worker)


def test_the_bare_loop_replays_the_captured_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_capturable_attention(monkeypatch)
    monkeypatch.setattr(engine_runs, "InProcessExecutor", GraphExecutor)
    engine = EngineRuns(TINY, QUICK, tmp_path, "cpu", {"attention_backend": "torch"})
    assert engine.worker.runner.kv_bytes_per_token == 2 * TINY.kv_bytes_per_token  # float32
    executor, attention = engine.executor, engine.worker.runner.attention
    assert isinstance(executor, GraphExecutor) and isinstance(attention, CapturableAttention)
    last = engine.decode(3, overlap=True).last
    assert len(last.req_pool_indices) == 3
    replayed, planned = executor.backend.replayed, len(attention.planned)
    bare = bare_decode(engine.worker, last, count=5)
    assert bare.graph_size == 4 and bare.ms > 0
    # Forward and sampling of five repetitions and three to warm up, planned once.
    assert executor.backend.replayed - replayed == 2 * (5 + 3)
    assert len(attention.planned) - planned == 1
