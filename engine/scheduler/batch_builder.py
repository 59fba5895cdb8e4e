"""Builds the message of a step that was decided: allocates its slots and fills its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from engine.protocol.messages import ForwardMode, IntArray, ModelWorkerBatch, SlotParams
from engine.protocol.step_parts import ForcedRun, PooledRows, SlotSpeculation, VerifyRows
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
    whole_steps: bool = False,
) -> tuple[ModelWorkerBatch, LaunchedStep, list[int]]:
    """The step's message, what the scheduler keeps of it, and the last slot of each extend row
    that ends its prompt.

    With `send_tokens`, decode rows carry their token, because pipeline stages other than the last
    have no FutureMap entry for it; else they carry -1. With `whole_steps`, no step of these rows is
    in flight and their requests have drafts: the step needs nothing of the worker's.
    """
    rows_of_decode = None
    if decode is not None:
        rows_of_decode = _decode_rows(kv, decode, send_tokens, whole_steps)
    if not additions:
        assert decode is not None and rows_of_decode is not None
        return _decode_only(step, micro_batch, decode, rows_of_decode)
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
    mode, verify = ForwardMode.EXTEND, None
    if decode is not None and rows_of_decode is not None:
        rows = np.concatenate([rows, decode.rows])
        seq_lens = np.concatenate([seq_lens, rows_of_decode.seq_lens])
        input_ids = np.concatenate([input_ids, rows_of_decode.input_ids])
        locs = np.concatenate([locs, rows_of_decode.locs])
        decode_numbers = np.arange(len(reqs), len(reqs) + len(decode), dtype=np.int32)
        sample_rows = np.concatenate([sample_rows, decode_numbers])
        verify = rows_of_decode.verify
        mode = ForwardMode.MIXED if verify is None else ForwardMode.VERIFY
        sampled = sampled + decode.reqs
        all_reqs = reqs + decode.reqs
        rids = np.concatenate([rids, decode.rids])
        readers = np.concatenate([readers, decode.readers])
    batch = ModelWorkerBatch(
        step=step,
        micro_batch=micro_batch,
        forward_mode=mode,
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
        new_slots=[_slot_params(r, kv.speculates) for r in fresh],
        extend_next_ids=_next_ids(reqs) if any(r.wants_prompt_logprobs for r in reqs) else None,
        pooled=_pooled_rows(additions) if any(r.pooling for r in reqs) else None,
        verify=verify,
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
        drafts=None if verify is None or decode is None else _planned(decode),
        forced={} if rows_of_decode is None else rows_of_decode.forced,
    )
    return batch, launched, last_locs


class _DecodeRows(NamedTuple):
    """The decode rows' part of a step, as in `ModelWorkerBatch`."""

    seq_lens: IntArray
    input_ids: IntArray
    locs: IntArray
    verify: VerifyRows | None = None
    forced: Mapping[int, ForcedRun] = MappingProxyType({})
    """By number of the row: drafts of constrained rows."""


def _decode_rows(
    kv: KVManager, decode: RunningBatch, send_tokens: bool, whole_steps: bool
) -> _DecodeRows:
    after = decode.seq_lens + 1
    drafts = decode.drafts
    if drafts is None:
        locs = kv.decode(decode.rows, after, decode.last_locs)
        return _DecodeRows(after, _decode_tokens(decode, send_tokens), locs)
    drafts.alloc = kv.reserve(decode.rows, drafts.alloc, drafts.targets)
    planned = drafts.planned
    if decode.is_exact and not planned.any():
        locs = kv.slot_at(decode.rows, decode.seq_lens)
        return _DecodeRows(after, _decode_tokens(decode, send_tokens), locs)
    forced: dict[int, ForcedRun] = {}
    if drafts.forced:
        numbers = enumerate(decode.rows.tolist())
        forced = {i: drafts.forced[row].run for i, row in numbers if row in drafts.forced}
    if whole_steps:
        known = [
            token
            for req, count in zip(decode.reqs, planned.tolist(), strict=True)
            for token in (req.output_ids[-1], *req.drafts[:count])
        ]
        locs = kv.slots(decode.rows, decode.seq_lens, planned + 1)
        return _DecodeRows(after + planned, _ints(known), locs, VerifyRows(planned), forced)
    starts, counts = decode.seq_lens, drafts.targets - decode.seq_lens
    slots = kv.slots(decode.rows, starts, counts)
    verify = VerifyRows(planned, slots, starts, counts, forced or None)
    return _DecodeRows(after, _NONE, _NONE, verify, forced)


def _planned(decode: RunningBatch) -> tuple[IntArray, IntArray]:
    assert decode.drafts is not None
    return decode.rows, decode.drafts.planned


def _decode_only(
    step: int, micro_batch: int, decode: RunningBatch, rows: _DecodeRows
) -> tuple[ModelWorkerBatch, LaunchedStep, list[int]]:
    batch = ModelWorkerBatch(
        step,
        micro_batch,
        ForwardMode.DECODE if rows.verify is None else ForwardMode.VERIFY,
        0,
        decode.rows,
        rows.seq_lens,
        _NONE,
        rows.input_ids,
        rows.locs,
        _NONE,
        _NONE,
        _NONE,
        np.arange(len(decode), dtype=np.int32),
        [],
        verify=rows.verify,
    )
    launched = LaunchedStep(step, decode.reqs, decode.reqs, decode.rids, decode.readers)
    if rows.verify is not None:
        launched.drafts, launched.forced = _planned(decode), rows.forced
    return batch, launched, []


def _decode_tokens(decode: RunningBatch, send: bool) -> IntArray:
    if not send:
        return np.full(len(decode), -1, np.int32)
    return _ints([r.output_ids[-1] for r in decode.reqs])


def _slot_params(req: Req, speculates: bool) -> SlotParams:
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
        token_ids=req.fill_ids if params.has_penalties or speculates else None,
        speculation=_speculation(req) if speculates else None,
    )


def _speculation(req: Req) -> SlotSpeculation:
    # Names of keys hold no line feed, so no two pairs of key and salt are the same.
    namespace = f"{req.key_name}\n{req.namespace}"
    return SlotSpeculation(req.prompt_len + req.max_new_tokens, namespace, req.prediction)


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
