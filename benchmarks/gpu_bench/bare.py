"""The kernels of a decode step in a bare loop: what the step costs without the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.gpu_bench.card import seconds_per_call
from engine.protocol.step import ModelWorkerBatch
from engine.worker.graphs.decode_graphs import DecodeGraphs, Variant
from engine.worker.tp_worker import TpModelWorker


class BareFigures(NamedTuple):
    """Mean time of one repetition of a step."""

    ms: float
    graph_size: int | None
    """Rows of the captured decode; None: launched kernel by kernel."""
    kernels: list[dict[str, object]]
    """Name, launches and microseconds per step of the kernels, longest first; none on CPU."""


@torch.inference_mode()
def bare_decode(worker: TpModelWorker, batch: ModelWorkerBatch, count: int) -> BareFigures:
    """Repeat a decode step that `worker` has run: forward and greedy sampling.

    The step is planned once; nothing is composed, uploaded, downloaded or waited for in between.
    The requests may have ended: their pages keep their content as long as no other step runs.
    """
    graphs = worker.graphs
    size = None if graphs is None else graphs.size_for(batch)
    with worker.queue.stream():
        if graphs is not None and size is not None:
            run = _captured(worker, graphs, batch, size)
        else:
            run = _eager(worker, batch)
        seconds = seconds_per_call(run, count, worker.runner.device)
        kernels = kernel_times(run, 4) if worker.runner.device.type == "cuda" else []
    return BareFigures(seconds * 1e3, size, kernels)


def kernel_times(run: Callable[[], None], count: int) -> list[dict[str, object]]:
    """Kernels of one call of `run`, averaged over `count`, longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            run()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [
        {
            "kernel": event.key[:160],
            "launches": event.count / count,
            "us": event.self_device_time_total / count,
        }
        for event in found
        if event.self_device_time_total
    ]


def _captured(
    worker: TpModelWorker, graphs: DecodeGraphs, batch: ModelWorkerBatch, size: int
) -> Callable[[], None]:
    prepared = graphs.prepare(batch, size)
    worker.runner.attention.plan_graph(prepared)
    # Not `DecodeGraphs.forward`, which plans and measures the time on every call.
    graph = graphs._graphs[size]
    forward, sample = graph.forward, graph.sample[Variant.GREEDY]

    def run() -> None:
        forward()
        sample()

    return run


def _eager(worker: TpModelWorker, batch: ModelWorkerBatch) -> Callable[[], None]:
    prepared = worker.runner.prepare(batch)
    worker.future_map.resolve(prepared)
    slots_cpu = batch.req_pool_indices

    def run() -> None:
        output = worker.runner.forward(prepared)
        if output is None:
            raise ValueError("only the last pipeline stage samples")
        slots, lens = prepared.sample_rows, prepared.sample_lens
        sampled = worker.sampler(output.logits, slots, slots_cpu, lens, None)
        worker.future_map.store(slots, sampled.next_token_ids)

    return run
