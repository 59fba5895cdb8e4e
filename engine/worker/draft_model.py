"""`DraftModelDrafter`: a small model of the same vocabulary drafts.

Its keys and values lie at the same KV slots as those of the target, in a pool of its own, and its
rows are those of the target's table. It draws with the noise of the request and position that the
target will draw with. So where the two distributions are alike, so are the tokens.

What the cache holds for it need not be right: pages that came without its computing them (steps
without drafts, prefixes of such requests) make its drafts worse, never an output wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.forward_batch import ForwardBatch
from engine.checkpoint.folder import resolve_model_path
from engine.checkpoint.model_config import ModelConfig
from engine.config import WorkerConfig
from engine.device.distributed import ParallelState
from engine.errors import ConfigError
from engine.protocol.step import IntArray, ModelWorkerBatch, RowParams, positions
from engine.sampling.sampler import Sampler
from engine.speculative.drafter import Drafter
from engine.worker.model_runner import ModelRunner

_NONE: IntArray = np.zeros(0, np.int32)


class _Line(NamedTuple):
    """A request that drafts."""

    row: int
    most: int
    drafts: list[int]


class DraftTarget(NamedTuple):
    """What a drafter may share with the worker of the model that checks its drafts."""

    config: WorkerConfig
    runner: ModelRunner
    sampler: Sampler


class DraftModelDrafter(Drafter):
    """Every tensor parallel rank has the whole model and computes the same drafts."""

    def attach(self, target: DraftTarget) -> None:
        """Loads the model. Raises `ConfigError` if it can't be read."""
        config, runner = target.config, target.runner
        if runner.device.type != "cpu":
            raise ConfigError(
                f"speculative_config.method {self.config.method} runs on CPU only so far; choose "
                "ngram or suffix."
            )
        assert self.config.model is not None
        whole = {"tp_size": 1, "pp_size": 1, "ep_size": None, "enable_expert_metrics": False}
        alone = config.engine.model_copy(update=whole)
        model = ModelConfig.from_pretrained(resolve_model_path(self.config.model))
        resolved = replace(config.resolved, engine=alone, model=model)
        self._runner = ModelRunner(
            replace(config, resolved=resolved, num_kv_tokens=runner.kv_pool.num_slots),
            ParallelState.single(),
            table=runner.req_to_token,
        )
        self._table: IntArray = runner.req_to_token.numpy()
        self._sampler = target.sampler
        self._tokens: dict[int, list[int]] = {}
        self._lens: dict[int, int] = {}
        """Tokens of each row whose keys and values the model has computed."""

    def install(self, params: RowParams) -> None:
        assert params.token_ids is not None
        self._tokens[params.row] = params.token_ids.tolist()
        self._lens[params.row] = 0

    def observe(self, row: int, tokens: Sequence[int]) -> None:
        self._tokens[row] += tokens

    def reserve(self, rows: IntArray, starts: IntArray, counts: IntArray, slots: IntArray) -> None:
        self._table[np.repeat(rows, counts), positions(starts, counts)] = slots

    def prefill(self, batch: ModelWorkerBatch, forward: ForwardBatch) -> None:
        chunks = batch.query_lens > batch.num_sampled
        if not chunks.any():
            return
        self._compute(forward)
        rows, lens = batch.req_pool_indices[chunks], batch.seq_lens[chunks]
        self._lens.update(zip(rows.tolist(), lens.tolist(), strict=True))

    def propose(self, rows: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        lines = [_Line(row, most, []) for row, most in zip(rows, counts, strict=True)]
        active = [line for line in lines if line.most > 0]
        while active:
            self._draft(active)
            active = [line for line in active if len(line.drafts) < line.most]
        return [line.drafts for line in lines]

    @torch.inference_mode()
    def _draft(self, lines: list[_Line]) -> None:
        """One more draft for each of the lines, behind all tokens that aren't computed yet."""
        rows = np.array([line.row for line in lines], np.int32)
        texts = [self._tokens[line.row] + line.drafts for line in lines]
        ends = np.array([len(text) for text in texts], np.int32)
        starts = np.array(
            [min(self._lens[line.row], len(t) - 1) for line, t in zip(lines, texts, strict=True)],
            np.int32,
        )
        counts = ends - starts
        inputs = [token for t, at in zip(texts, starts.tolist(), strict=True) for token in t[at:]]
        batch = ModelWorkerBatch(
            0,
            0,
            rows,
            counts,
            np.ones(len(rows), np.int32),
            ends,
            np.array(inputs, np.int32),
            self._table[np.repeat(rows, counts), positions(starts, counts)],
            _NONE,
            _NONE,
            _NONE,
            [],
        )
        forward = ForwardBatch.from_worker_batch(batch, self._runner.device)
        hidden = self._compute(forward).index_select(0, forward.logits_rows)
        logits = self._runner.model.compute_logits(hidden).float()
        drawn = self._sampler.draw(
            logits.contiguous(), forward.sample_rows, rows, forward.sample_lens
        )
        for line, end, token in zip(lines, ends.tolist(), drawn.tolist(), strict=True):
            self._lens[line.row] = end
            line.drafts.append(token)

    @torch.inference_mode()
    def _compute(self, forward: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, hidden]; writes keys and values."""
        self._runner.attention.init_forward(forward)
        return self._runner.model.forward(forward, self._runner.attention, None)
