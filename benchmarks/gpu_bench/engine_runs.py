"""Runs Manta's engine in this process: scheduler, executor and worker, without Ray or tokenizer.

One worker, whose weights, KV cache and graphs take long to make, serves all runs; each run has a
scheduler of its own.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.gpu_bench.shapes import ModelShape, Plan
from engine.config import EngineConfig, load_config
from engine.executor.base import Executor
from engine.executor.in_process import InProcessExecutor
from engine.loop.engine_core import EngineCore
from engine.protocol.messages import AddRequest
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence
from engine.protocol.step import ForwardMode, GenerationBatchResult, ModelWorkerBatch, SampleMasks
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.trace import StageSpan, StepSpan
from engine.worker.auto_config import make_worker_config
from engine.worker.tp_worker import TpModelWorker

SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 0.6, "top_p": 0.9},
}
"""Ways to sample that are measured. The last is Llama 3's generation_config.json, so it is what a
request gets that says nothing."""


@dataclass
class Recorder(Executor):
    """Passes all calls on to `inner`, and records the steps."""

    inner: Executor
    context: dict[int, int] = field(default_factory=dict)
    """By step: tokens that its rows have in the KV cache."""
    last_decode: ModelWorkerBatch | None = None

    def __post_init__(self) -> None:
        self.num_kv_tokens = self.inner.num_kv_tokens

    def launch(self, batch: ModelWorkerBatch) -> None:
        self.inner.launch(batch)
        self.context[batch.step] = int(batch.seq_lens.sum())
        if batch.forward_mode is ForwardMode.DECODE:
            # The scheduler may reuse the array when rows leave.
            rows = batch.req_pool_indices.copy()
            self.last_decode = msgspec.structs.replace(batch, req_pool_indices=rows)

    def sample(self, masks: SampleMasks) -> None:
        self.inner.sample(masks)

    def wait(self, timeout_s: float | None) -> GenerationBatchResult | None:
        return self.inner.wait(timeout_s)

    def shutdown(self) -> None:
        self.inner.shutdown()


class Run(NamedTuple):
    """Requests that ran to their end."""

    wall_s: float
    num_tokens: int
    """Number of tokens generated."""
    spans: list[StepSpan]
    stage: dict[int, StageSpan]
    """By step: when the device computed it."""
    record: Recorder

    def device_s(self, spans: list[StepSpan]) -> list[float]:
        """Seconds of each step, from the device's clock."""
        stage = self.stage
        return [stage[s.step].ended_at - stage[s.step].started_at for s in spans]


class DecodeFigures(NamedTuple):
    """Steps in which all rows decode, in steady state."""

    wall_ms: float
    """Median time from one step's result to the next one's."""
    tokens_per_s: float
    """Rate over all these steps, slow ones included."""
    device_ms: float
    """Median time of a step, from the device's clock."""
    busy: float
    """Device time / wall time. An upper bound where the device waits for the host: a step's device
    time begins when the host starts to launch it."""
    context: float
    """Mean tokens per row."""
    last: ModelWorkerBatch


class PrefillFigures(NamedTuple):
    """One prompt on an idle engine."""

    wall_ms: float
    """Median time from composing its first chunk to its token."""
    device_ms: float


class ServingFigures(NamedTuple):
    """Figures of many requests that came at once."""

    tokens_per_s: float
    busy: float
    num_steps: int


class EngineRuns:
    """An engine for `plan` with random weights; `options` are keys of docs/configuration.md.

    Raises `ConfigError` where the model doesn't fit.
    """

    def __init__(
        self, shape: ModelShape, plan: Plan, folder: Path, device: str, options: dict[str, str]
    ) -> None:
        self.plan = plan
        self._rng = np.random.default_rng(0)
        dtype = "bfloat16" if device == "cuda" else "float32"
        rows = max(*plan.batches, plan.concurrency)
        keys: dict[str, object] = {
            "model": str(shape.write(folder, dtype)),
            "device": device,
            "dtype": dtype,
            "load_format": "dummy",
            "max_model_len": plan.max_model_len,
            "max_running_requests": rows,
            "max_queued_requests": max(2048, plan.num_requests),
            "chunked_prefill_size": plan.chunk,
            "memory_fraction": 0.9,
            # Room for every request at full length, its last page included.
            "max_total_tokens": max(rows * (plan.longest_decode + 64), 2 * plan.max_model_len),
            **options,
        }
        resolved = load_config(EngineConfig, keys).resolve()
        worker = make_worker_config(resolved)
        self.executor = InProcessExecutor(worker)
        self.scheduler = SchedulerConfig(resolved, self.executor.num_kv_tokens)
        self.attention_backend = worker.kernels.attention
        self.sampling_backend = worker.kernels.sampling

    @property
    def worker(self) -> TpModelWorker:
        """The worker that all runs share."""
        worker = self.executor.worker
        if not isinstance(worker, TpModelWorker):
            raise TypeError(f"{type(worker).__name__} computes nothing")
        return worker

    def describe(self) -> dict[str, object]:
        """What the engine decided by itself, ready for JSON."""
        graphs = self.worker.graphs
        return {
            "attention_backend": self.attention_backend,
            "sampling_backend": self.sampling_backend,
            "graph_sizes": [] if graphs is None else graphs.sizes,
            "page_size": self.scheduler.engine.page_size,
            "chunked_prefill_size": self.scheduler.chunk_size,
            "kv_tokens": self.executor.num_kv_tokens,
        }

    def decode(self, batch: int, *, overlap: bool, sampling: str = "greedy") -> DecodeFigures:
        """Steps of `batch` rows. Prompts are computed first, so that rows have equal lengths.

        `sampling`: a word of `SAMPLING`.
        """
        plan = self.plan
        run = self._run(
            [plan.decode_prompt] * batch,
            plan.warmup + plan.steps + 2,
            overlap,
            mixed=False,
            sampling=sampling,
        )
        spans = [s for s in run.spans if s.mode == "decode" and s.num_rows == batch]
        spans = spans[plan.warmup : plan.warmup + plan.steps + 1]
        if len(spans) <= plan.steps or run.record.last_decode is None:
            raise RuntimeError(f"only {len(spans)} steps had all {batch} rows")
        received = np.array([s.received_at for s in spans])
        device_s = run.device_s(spans[1:])
        # Measured between ends on the device: results arrive later, by delays that differ.
        device_wall_s = run.stage[spans[-1].step].ended_at - run.stage[spans[0].step].ended_at
        tokens = [run.record.context[s.step] for s in spans[1:]]
        return DecodeFigures(
            float(np.median(np.diff(received))) * 1e3,
            batch * plan.steps / float(received[-1] - received[0]),
            float(np.median(device_s)) * 1e3,
            sum(device_s) / device_wall_s,
            float(np.mean(tokens)) / batch,
            run.record.last_decode,
        )

    def prefill(self, num_tokens: int) -> PrefillFigures:
        """One prompt at a time; the first is a warm-up."""
        wall, device = [], []
        for _ in range(self.plan.repeats + 1):
            run = self._run([num_tokens], 1, overlap=True, mixed=True)
            spans = [s for s in run.spans if s.mode != "decode"]
            wall.append(spans[-1].received_at - spans[0].composed_at)
            device.append(sum(run.device_s(spans)))
        return PrefillFigures(float(np.median(wall[1:])) * 1e3, float(np.median(device[1:])) * 1e3)

    def serve(self, *, overlap: bool) -> ServingFigures:
        """The plan's requests at once, of which `concurrency` run."""
        plan = self.plan
        run = self._run([plan.input_len] * plan.num_requests, plan.output_len, overlap, mixed=True)
        busy = sum(run.device_s(run.spans)) / run.wall_s
        return ServingFigures(run.num_tokens / run.wall_s, busy, len(run.spans))

    def warm_up(self) -> None:
        """Run prefill chunks, mixed steps and decodes once, so that kernels are loaded."""
        plan = self.plan
        self._run([plan.input_len] * plan.concurrency, 4, overlap=True, mixed=True)

    def _run(
        self,
        prompts: list[int],
        max_tokens: int,
        overlap: bool,
        *,
        mixed: bool,
        sampling: str = "greedy",
    ) -> Run:
        """Random prompts of these lengths, all added before the first step."""
        record = Recorder(self.executor)
        resolved = self.scheduler.resolved
        modes = {"enable_overlap": overlap, "enable_mixed_chunk": mixed}
        engine = resolved.engine.model_copy(update=modes)
        config = replace(self.scheduler, resolved=replace(resolved, engine=engine))
        core = EngineCore(Scheduler(config), record)
        keys = {"max_tokens": max_tokens, "ignore_eos": True, **SAMPLING[sampling]}
        ids = [self._rng.integers(2, config.vocab_size, n).astype(np.int32) for n in prompts]
        # As in the scheduler's actor: the collector doesn't walk objects that stay anyway.
        gc.collect()
        gc.freeze()
        try:
            started = core.clock()
            for rid, input_ids in enumerate(ids):
                params = SamplingParams(**keys, seed=rid)
                request = AddRequest(rid=rid, sequence=TokenSequence(input_ids, params))
                core.scheduler.add(request, core.clock())
            num_tokens = _run_to_end(core, len(prompts))
            wall_s = core.clock() - started
        finally:
            gc.unfreeze()
        if num_tokens != len(prompts) * max_tokens:
            raise RuntimeError(f"{num_tokens} tokens came instead of {len(prompts) * max_tokens}")
        spans = core.trace.snapshot()
        stage = {s.step: s for s in self.executor.trace.snapshot(len(spans))}
        return Run(wall_s, num_tokens, spans, stage, record)


def _run_to_end(core: EngineCore, num_requests: int) -> int:
    """Step until all requests have ended. Returns the number of their tokens."""
    num_tokens = 0
    while num_requests:
        for _, out in core.step():
            num_tokens += len(out.rids)
            num_requests -= len(out.finished)
            for end in out.finished:
                if end.reason != "length":
                    raise RuntimeError(f"a request ended by {end.reason}: {end.message}")
    while core.scheduler.num_in_flight:
        core.process_one()
    return num_tokens
