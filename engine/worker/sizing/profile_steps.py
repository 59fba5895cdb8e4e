"""The largest steps that a scheduler may send. Their peak memory is kept free."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from engine.config import WorkerConfig
from engine.protocol.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.protocol.step import ModelWorkerBatch, RowParams
from engine.sampling.features.draw import COSTLIEST


def largest_steps(config: WorkerConfig) -> list[ModelWorkerBatch]:
    """Steps to run before there is a KV cache.

    There are two, because different parts cost most. One is a chunk at the end of the longest
    prompt, with its log-probabilities (attention over the whole context, logits of every token).
    The other has the largest number of rows that may run, all sampled (logits of every row, sorted
    for top-p). If the engine speculates, a third has all rows with all their drafts, each sampled.
    Where requests may have adapters, all rows have that of slot 0.

    Every token lies in the padding page, so that no KV cache is needed: the values mean nothing,
    the shapes are right.
    """
    tokens = config.max_step_tokens
    chunk = min(tokens, config.max_model_len)
    logprobs = SamplingParams(
        max_tokens=1, temperature=0, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
    )
    long = _extend_step(0, [chunk], [config.max_model_len - chunk], logprobs)
    # Every id ends a chunk that isn't the prompt's last: all its tokens have log-probabilities.
    long.next_prompt_ids = np.zeros(1, np.int32)
    rows = min(config.engine.max_running_requests, tokens)
    lens = [n for n in _even(tokens, rows, config.max_model_len) if n]
    steps = [long, _extend_step(1, lens, [0] * len(lens), COSTLIEST)]
    if config.engine.speculative_config is not None:
        drafts = min(
            config.engine.speculative_config.num_speculative_tokens, config.max_model_len - 1
        )
        steps.append(_verify_step(2, config.engine.max_running_requests, drafts, COSTLIEST))
    if config.engine.has_adapters:
        for step in steps:
            step.adapters = np.zeros(len(step.query_lens), np.int32)
    return steps


def _verify_step(step: int, rows: int, drafts: int, params: SamplingParams) -> ModelWorkerBatch:
    """`rows` requests that check `drafts` drafts each."""
    batch = _extend_step(step, [drafts + 1] * rows, [0] * rows, params)
    return msgspec.structs.replace(batch, num_sampled=batch.query_lens)


def _extend_step(
    step: int, lens: Sequence[int], prefixes: Sequence[int], params: SamplingParams
) -> ModelWorkerBatch:
    """Line i, of row i + 1, extends `prefixes[i]` tokens of context by `lens[i]`."""
    query_lens = np.asarray(lens, np.int32)
    seq_lens = query_lens + np.asarray(prefixes, np.int32)
    total = int(query_lens.sum())
    return ModelWorkerBatch(
        step=step,
        micro_batch=0,
        req_pool_indices=np.arange(1, len(lens) + 1, dtype=np.int32),  # row 0 is padding
        query_lens=query_lens,
        num_sampled=np.ones(len(lens), np.int32),
        seq_lens=seq_lens,
        input_ids=np.zeros(total, np.int32),
        out_cache_loc=np.zeros(total, np.int32),
        prefix_rows=np.zeros(0, np.int32),
        prefix_lens=np.zeros(0, np.int32),
        prefix_locs=np.zeros(0, np.int32),
        new_rows=[
            RowParams(row, int(seq_len), [], params) for row, seq_len in enumerate(seq_lens, 1)
        ],
    )


def _even(total: int, parts: int, most: int) -> list[int]:
    """`total` divided evenly over `parts`, none of them above `most`."""
    return [min(most, total // parts + (i < total % parts)) for i in range(parts)]
