"""Drives a ModelRunner without a scheduler: any mix of chunks and decode rows, any slots."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.device.distributed import ParallelState
from engine.protocol.step import ModelWorkerBatch
from engine.worker.model_runner import ForwardOutput, ModelRunner
from tests.support.models import make_config


@dataclass
class DrivenReq:
    """One request: `tokens` so far, of which the first `done` are in the KV cache."""

    row: int
    tokens: list[int]
    done: int = 0
    pages: list[int] = field(default_factory=list)


class StepDriver:
    """Hands out rows and random pages, builds batches, runs them."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.page_size = runner.kv_pool.page_size
        self.random = random.Random(seed)
        self.free = list(range(1, runner.kv_pool.num_slots // self.page_size + 1))
        self.random.shuffle(self.free)
        self.rows = list(range(1, runner.req_to_token.shape[0]))
        self.step = 0

    def add(self, tokens: list[int]) -> DrivenReq:
        return DrivenReq(self.rows.pop(0), list(tokens))

    def share_prefix(self, req: DrivenReq, other: DrivenReq, length: int) -> None:
        """Let `req` start from the first `length` tokens that `other` has in the cache."""
        assert length % self.page_size == 0 and length <= other.done
        req.pages = other.pages[: length // self.page_size]
        req.done = length

    def remove(self, req: DrivenReq) -> None:
        """Free the row and pages at once for reuse."""
        self.rows.insert(0, req.row)
        self.free = req.pages + self.free

    def run(
        self,
        extends: list[tuple[DrivenReq, int]],
        decodes: list[DrivenReq],
        *,
        prompt_logits: bool = False,
        micro_batch: int = 0,
        sampled: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Run one step: (request, chunk length) rows, then single tokens.

        Returns logits [rows, vocab] of the last tokens of the rows `sampled`, by default of all
        (None if not the last stage), and with `prompt_logits` each extend row's logits of all its
        tokens.
        """
        batch = self.build(extends, decodes, micro_batch, sampled)
        forward_batch = self.runner.prepare(batch)
        if prompt_logits:
            forward_batch.prompt_logits_lines = list(range(len(extends)))
        output = self.runner.forward(forward_batch)
        if output is None:
            return None, []
        assert isinstance(output, ForwardOutput)
        rows = [
            self.runner.prompt_logits(forward_batch, output, row)
            for row in forward_batch.prompt_logits_lines
        ]
        return output.logits, rows

    def build(
        self,
        extends: list[tuple[DrivenReq, int]],
        decodes: list[DrivenReq],
        micro_batch: int = 0,
        sampled: Sequence[int] | None = None,
    ) -> ModelWorkerBatch:
        """The step's message; counts its tokens as done."""
        rows = [*extends, *((req, 1) for req in decodes)]
        input_ids: list[int] = []
        locs: list[int] = []
        prefix_rows: list[int] = []
        prefix_lens: list[int] = []
        prefix_locs: list[int] = []
        for index, (req, count) in enumerate(rows):
            if index < len(extends) and req.done:
                prefix_rows.append(req.row)
                prefix_lens.append(req.done)
                prefix_locs.extend(self._slot(req, i) for i in range(req.done))
            end = req.done + count
            while len(req.pages) * self.page_size < end:
                req.pages.append(self.free.pop(0))
            input_ids.extend(req.tokens[req.done : end])
            locs.extend(self._slot(req, i) for i in range(req.done, end))
            req.done = end
        assert len(input_ids) == sum(count for _, count in rows)
        self.step += 1
        samples = range(len(rows)) if sampled is None else sampled
        return ModelWorkerBatch(
            step=self.step,
            micro_batch=micro_batch,
            req_pool_indices=_ints(req.row for req, _ in rows),
            query_lens=_ints(count for _, count in rows),
            num_sampled=_ints(line in samples for line in range(len(rows))),
            seq_lens=_ints(req.done for req, _ in rows),
            input_ids=_ints(input_ids),
            out_cache_loc=_ints(locs),
            prefix_rows=_ints(prefix_rows),
            prefix_lens=_ints(prefix_lens),
            prefix_locs=_ints(prefix_locs),
            new_rows=[],
        )

    def _slot(self, req: DrivenReq, position: int) -> int:
        page, offset = divmod(position, self.page_size)
        return req.pages[page] * self.page_size + offset


def make_runner(
    folder: str, *, parallel: ParallelState | None = None, **changes: Any
) -> ModelRunner:
    """A CPU runner with sizes for tests; `changes` are fields of `WorkerConfig`."""
    parallel = parallel or ParallelState.single()
    return ModelRunner(make_config(folder, parallel, **changes), parallel)


def run_lines(driver: StepDriver, lines: list[list[int]], num_decoded: int) -> list[torch.Tensor]:
    """Logits [tokens, vocab] behind each token of `lines`, the last `num_decoded` one by one:
    chunks of some beside decodes of others. [] unless it is the last stage."""
    reqs = [driver.add(line) for line in lines]
    found: list[list[torch.Tensor]] = [[] for _ in lines]
    while any(req.done < len(req.tokens) for req in reqs):
        behind = [req for req in reqs if len(req.tokens) - req.done > num_decoded]
        extends = [(req, min(16, len(req.tokens) - num_decoded - req.done)) for req in behind]
        decodes = [r for r in reqs if r not in behind and r.done < len(r.tokens)]
        logits, rows = driver.run(extends, decodes, prompt_logits=True)
        if logits is None:
            continue
        for (req, _), row in zip(extends, rows, strict=True):
            found[reqs.index(req)].append(row)
        for req, row in zip(decodes, logits[len(extends) :], strict=True):
            found[reqs.index(req)].append(row[None])
    return [torch.cat(parts) for parts in found if parts]


def _ints(values: object) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)  # type: ignore[call-overload]
