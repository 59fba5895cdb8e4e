"""Builds the message of a step that was decided: allocates its slots and fills its arrays."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from engine.protocol.messages import (
    ForwardMode,
    IntArray,
    ModelWorkerBatch,
    PooledRows,
    SlotParams,
)
from engine.scheduler.kv_manager import KVManager
from engine.scheduler.micro_batch import LaunchedStep
from engine.scheduler.prefill_adder import Addition
from engine.scheduler.req import Req
from engine.scheduler.running_batch import RunningBatch

_NONE: IntArray = np.zeros(0, np.int32)


def build_batch(
    kv: KVManager,
    step: int,
    micro_batch: int,
    additions: Sequence[Addition],
    decode: RunningBatch | None,
    *,
    send_tokens: bool,
) -> tuple[ModelWorkerBatch, LaunchedStep, list[int]]:
    """The step's message, what the scheduler keeps of it, and the last slot of each extend row
    that ends its prompt.

    With `send_tokens`, decode rows carry their token, because pipeline stages other than the last
    have no FutureMap entry for it; else they carry -1.
    """
    if not additions:
        assert decode is not None
        return _decode_only(kv, step, micro_batch, decode, send_tokens)
    reqs = [a.req for a in additions]
    lens = [a.num_tokens for a in additions]
    fresh = [r for r in reqs if not r.installed]
    with_prefix = [r for r in fresh if r.cached_len]
    chunks = [r.fill_ids[r.kv_len : r.kv_len + n] for r, n in zip(reqs, lens, strict=True)]
    locs = kv.extend(reqs, lens)
    ends = np.cumsum(lens) - 1
    last_locs = [int(locs[e]) for e, a in zip(ends.tolist(), additions, strict=True) if a.last]
    rows = _ints([r.req_pool_idx for r in reqs])
    seq_lens = _ints([r.kv_len for r in reqs])
    sampled_idx = [i for i, a in enumerate(additions) if a.last and a.req.pooling is None]
    sampled = [reqs[i] for i in sampled_idx]
    rids = np.array([r.rid for r in sampled], np.int64)
    readers = _ints([r.reader_no for r in sampled])
    all_reqs: list[Req] = reqs
    input_ids = np.concatenate(chunks)
    sample_rows = _ints(sampled_idx)
    if decode is not None:
        after = decode.seq_lens + 1
        more = kv.decode(decode.rows, after, decode.last_locs)
        rows = np.concatenate([rows, decode.rows])
        seq_lens = np.concatenate([seq_lens, after])
        input_ids = np.concatenate([input_ids, _decode_tokens(decode, send_tokens)])
        locs = np.concatenate([locs, more])
        rows_of_decode = np.arange(len(reqs), len(reqs) + len(decode), dtype=np.int32)
        sample_rows = np.concatenate([sample_rows, rows_of_decode])
        sampled = sampled + decode.reqs
        all_reqs = reqs + decode.reqs
        rids = np.concatenate([rids, decode.rids])
        readers = np.concatenate([readers, decode.readers])
    batch = ModelWorkerBatch(
        step=step,
        micro_batch=micro_batch,
        forward_mode=ForwardMode.EXTEND if decode is None else ForwardMode.MIXED,
        num_extend=len(reqs),
        req_pool_indices=rows,
        seq_lens=seq_lens,
        extend_lens=_ints(lens),
        input_ids=input_ids.astype(np.int32, copy=False),
        out_cache_loc=locs,
        prefix_rows=_ints([r.req_pool_idx for r in with_prefix]),
        prefix_lens=_ints([r.cached_len for r in with_prefix]),
        prefix_locs=np.concatenate([r.prefix_indices for r in with_prefix])
        if with_prefix
        else _NONE,
        sample_rows=sample_rows,
        new_slots=[_slot_params(r) for r in fresh],
        extend_next_ids=_next_ids(reqs) if any(r.wants_prompt_logprobs for r in reqs) else None,
        pooled=_pooled_rows(additions) if any(r.pooling for r in reqs) else None,
    )
    for req in fresh:
        req.installed = True
    launched = LaunchedStep(
        step,
        all_reqs,
        sampled,
        rids,
        readers,
        num_landed=len(sampled_idx),
        chunk=(lens[0], reqs[0].kv_len - lens[0]) if len(all_reqs) == 1 else None,
        embedded=[] if batch.pooled is None else _embedded(batch.pooled, reqs),
    )
    return batch, launched, last_locs


def _decode_only(
    kv: KVManager, step: int, micro_batch: int, decode: RunningBatch, send_tokens: bool
) -> tuple[ModelWorkerBatch, LaunchedStep, list[int]]:
    after = decode.seq_lens + 1
    locs = kv.decode(decode.rows, after, decode.last_locs)
    batch = ModelWorkerBatch(
        step,
        micro_batch,
        ForwardMode.DECODE,
        0,
        decode.rows,
        after,
        _NONE,
        _decode_tokens(decode, send_tokens),
        locs,
        _NONE,
        _NONE,
        _NONE,
        np.arange(len(decode), dtype=np.int32),
        [],
    )
    launched = LaunchedStep(step, decode.reqs, decode.reqs, decode.rids, decode.readers)
    return batch, launched, []


def _decode_tokens(decode: RunningBatch, send: bool) -> IntArray:
    if not send:
        return np.full(len(decode), -1, np.int32)
    return _ints([r.output_ids[-1] for r in decode.reqs])


def _slot_params(req: Req) -> SlotParams:
    params = req.params
    if params.prompt_logprobs is not None and not req.wants_prompt_logprobs:
        params = msgspec.structs.replace(params, prompt_logprobs=None)
    if params.constraint is not None:
        params = msgspec.structs.replace(params, constraint=None)  # workers only need masks
    return SlotParams(
        slot=req.req_pool_idx,
        prompt_len=req.prompt_len,
        eos_token_ids=sorted(req.stop_ids - frozenset(params.stop_token_ids)),
        params=params,
        token_ids=req.fill_ids if params.has_penalties else None,
    )


def _next_ids(reqs: Sequence[Req]) -> IntArray:
    return _ints([int(r.fill_ids[r.kv_len]) if r.needs_prefill else -1 for r in reqs])


def _pooled_rows(additions: Sequence[Addition]) -> PooledRows:
    mean = [i for i, a in enumerate(additions) if a.req.pooling == "mean"]
    return PooledRows(
        _ints([i for i, a in enumerate(additions) if a.last and a.req.pooling == "last"]),
        _ints(mean),
        _ints([i for i in mean if additions[i].last]),
    )


def _embedded(pooled: PooledRows, reqs: Sequence[Req]) -> list[Req]:
    return [reqs[i] for i in (*pooled.last.tolist(), *pooled.mean_ends.tolist())]


def _ints(values: Sequence[int]) -> IntArray:
    return np.asarray(values, np.int32)
