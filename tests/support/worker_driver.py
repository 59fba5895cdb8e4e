"""Drives TpModelWorkers with random batches, as a scheduler with a step in flight would.

Requests come and go. Each decode row's input is -1, so the worker has to know the token. The driver
knows tokens only from results.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.device.distributed import ParallelState
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import (
    GenerationBatchResult,
    ModelWorkerBatch,
    RowParams,
    SampleMasks,
)
from engine.worker.graphs.backend import GraphBackend
from engine.worker.step_queue import StepQueue
from engine.worker.tp_worker import TpModelWorker
from tests.support.models import make_config

MakeParams = Callable[[int], SamplingParams]


@dataclass
class LiveReq:
    """One request: `done` tokens are in the cache."""

    number: int
    slot: int
    prompt: list[int]
    params: SamplingParams
    done: int = 0
    pages: list[int] = field(default_factory=list)
    constrained: bool = False


def make_worker(
    folder: Path | str,
    *,
    graph_backend: GraphBackend | None = None,
    max_batch_size: int = 0,
    parallel: ParallelState | None = None,
    max_running_requests: int = 24,
    max_model_len: int = 48,
    page_size: int = 4,
    device: str = "cpu",
    dtype: str = "float32",
    attention_backend: str = "torch",
    sampling_backend: str = "auto",
    load_format: str = "auto",
    enable_expert_metrics: bool = False,
    swa_full_tokens_ratio: float = 1.0,
    **keys: Any,
) -> TpModelWorker:
    parallel = parallel or ParallelState.single()
    config = make_config(
        folder,
        parallel,
        num_kv_tokens=max_running_requests * max_model_len,
        max_running_requests=max_running_requests,
        max_model_len=max_model_len,
        page_size=page_size,
        device=device,
        dtype=dtype,
        attention_backend=attention_backend,
        enable_expert_metrics=enable_expert_metrics,
        swa_full_tokens_ratio=swa_full_tokens_ratio,
        sampling_backend=sampling_backend,
        **keys,
        load_format=load_format,
        cuda_graph_max_batch_size=max_batch_size,
    )
    return TpModelWorker(config, parallel, graph_backend=graph_backend)


class Steps:
    """A random sequence of steps: joins, leaves, chunks and decodes, the same for a `seed`."""

    def __init__(
        self,
        make_params: MakeParams,
        *,
        seed: int = 0,
        max_requests: int = 24,
        max_len: int = 48,
        page_size: int = 4,
        vocab: int = 211,
        constrain: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.make_params = make_params
        self.max_requests = max_requests
        self.max_len = max_len
        self.page_size = page_size
        self.vocab = vocab
        self.constrain = constrain
        self.free_pages = list(range(1, max_requests * max_len // page_size + 1))
        self.free_slots = list(range(1, max_requests + 1))
        self.random.shuffle(self.free_pages)
        self.random.shuffle(self.free_slots)
        self.live: list[LiveReq] = []
        self.number = 0
        self.step = 0

    def next(self, target: int) -> tuple[ModelWorkerBatch, list[LiveReq]]:
        """A step that moves towards `target` running requests; with new ones it is mixed.

        The second result is the requests of its rows, which all sample.
        """
        for req in [r for r in self.live if r.done + 1 >= self.max_len]:
            self.drop(req)
        while len(self.live) > target:
            self.drop(self.random.choice(self.live))
        fresh: list[LiveReq] = []
        while len(self.live) + len(fresh) < target and len(fresh) < 6:
            prompt = [
                self.random.randrange(3, self.vocab) for _ in range(self.random.randint(1, 9))
            ]
            self.number += 1
            req = LiveReq(self.number, self.free_slots.pop(), prompt, self.make_params(self.number))
            req.constrained = self.constrain and self.random.random() < 0.3
            fresh.append(req)
        decodes = list(self.live)
        self.random.shuffle(decodes)
        self.live += fresh
        return self._batch(fresh, decodes), fresh + decodes

    def drop(self, req: LiveReq) -> None:
        self.live.remove(req)
        self.free_slots.append(req.slot)
        self.free_pages += req.pages

    def masks(self, batch: ModelWorkerBatch, reqs: list[LiveReq]) -> SampleMasks | None:
        """Even tokens only, for the constrained rows; None if there are none."""
        rows = [i for i, req in enumerate(reqs) if req.constrained]
        if not rows:
            return None
        words = np.full((len(rows), -(-self.vocab // 32)), 0x55555555, np.uint32)
        return SampleMasks(batch.step, _ints(rows), words)

    def _batch(self, fresh: list[LiveReq], decodes: list[LiveReq]) -> ModelWorkerBatch:
        self.step += 1
        input_ids: list[int] = []
        locs: list[int] = []
        for req in fresh:
            input_ids += req.prompt
            locs += self._grow(req, len(req.prompt))
        for req in decodes:
            input_ids.append(-1)
            locs += self._grow(req, 1)
        rows = fresh + decodes
        return ModelWorkerBatch(
            step=self.step,
            micro_batch=0,
            req_pool_indices=_ints([req.slot for req in rows]),
            query_lens=_ints([len(req.prompt) for req in fresh] + [1] * len(decodes)),
            num_sampled=np.ones(len(rows), np.int32),
            seq_lens=_ints([req.done for req in rows]),
            input_ids=_ints(input_ids),
            out_cache_loc=_ints(locs),
            prefix_rows=_ints([]),
            prefix_lens=_ints([]),
            prefix_locs=_ints([]),
            new_rows=[
                RowParams(
                    req.slot, len(req.prompt), [2], req.params, np.array(req.prompt, np.int32)
                )
                for req in fresh
            ],
            delayed_sample=any(req.constrained for req in rows),
        )

    def _grow(self, req: LiveReq, count: int) -> list[int]:
        end = req.done + count
        while len(req.pages) * self.page_size < end:
            req.pages.append(self.free_pages.pop())
        slots = [
            req.pages[i // self.page_size] * self.page_size + i % self.page_size
            for i in range(req.done, end)
        ]
        req.done = end
        return slots


class WindowedSteps(Steps):
    """Says which page layers with windows have of each page that is used for the first time."""

    def __init__(self, make_params: MakeParams, num_window_pages: int, *, seed: int = 0) -> None:
        super().__init__(make_params, seed=seed)
        self._free = list(range(num_window_pages, 0, -1))
        self._known: set[int] = set()

    @classmethod
    def of(cls, worker: TpModelWorker, make_params: MakeParams, *, seed: int = 0) -> WindowedSteps:
        """For the pages of a worker's layers with windows, which are fewer than those of others."""
        pool = worker.runner.kv_pool
        near = {pool.get(i).k.shape[0] for i, sees in enumerate(pool.has_windows) if sees}
        assert len(near) == 1 and max(near) < pool.num_slots // 2 + 9
        return cls(make_params, max(near) // pool.page_size - 1, seed=seed)

    def next(self, target: int) -> tuple[ModelWorkerBatch, list[LiveReq]]:
        batch, reqs = super().next(target)
        new = sorted({*(batch.out_cache_loc // self.page_size).tolist()} - self._known)
        self._known.update(new)
        if new:
            pages = [new, [self._free.pop() for _ in new]]
            batch = msgspec.structs.replace(batch, window_pages=np.array(pages, np.int32))
        return batch, reqs


def run_step(
    queue: StepQueue, batch: ModelWorkerBatch, masks: SampleMasks | None
) -> list[GenerationBatchResult]:
    """Launch a step and return the results before it; up to one step stays in flight."""
    queue.launch(batch)
    results = []
    oldest = queue.take_oldest() if len(queue._launched) > 1 else None
    while oldest is not None:
        results.append(oldest)
        oldest = queue.take_oldest() if len(queue._launched) > 1 else None
    if masks is not None:
        queue.apply(masks)
    return results


def drain(queue: StepQueue) -> list[GenerationBatchResult]:
    """Results of all steps that are still in flight."""
    results = []
    while (oldest := queue.take_oldest()) is not None:
        results.append(oldest)
    return results


def _ints(values: object) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)  # type: ignore[call-overload]


def params(number: int) -> SamplingParams:
    """Parameters that use the sampler's features in turn."""
    kinds: tuple[dict[str, Any], ...] = (
        dict(temperature=0.0),
        dict(seed=number),
        dict(seed=number, top_k=9),
        dict(seed=number, top_p=0.8),
        dict(seed=number, min_p=0.05),
        dict(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.1),
        dict(seed=number, frequency_penalty=0.2),
        dict(seed=number, logit_bias={7: 3.0}),
        dict(temperature=0.0, logprobs=3),
        dict(temperature=0.0, prompt_logprobs=2),
        dict(temperature=0.0, min_tokens=4, stop_token_ids=[9]),
    )
    return SamplingParams(**kinds[number % len(kinds)])
