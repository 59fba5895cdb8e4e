"""Builds the message of a step that was decided: allocates its slots and fills its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from engine.config import MAX_ROWS
from engine.protocol.step import (
    ForcedRun,
    Int64Array,
    IntArray,
    LateLines,
    ModelWorkerBatch,
    PooledLines,
    RowParams,
    RowSpeculation,
)
from engine.scheduler.adapters import AdapterTable
from engine.scheduler.kv_manager import KVManager
from engine.scheduler.micro_batch import LaunchedStep
from engine.scheduler.prefill_adder import Addition
from engine.scheduler.req import Req
from engine.scheduler.running_batch import RunningBatch

_NONE: IntArray = np.zeros(0, np.int32)
_ONES: IntArray = np.ones(MAX_ROWS, np.int32)
_UNKNOWN: IntArray = np.full(MAX_ROWS, -1, np.int32)
_ONES.flags.writeable = _UNKNOWN.flags.writeable = False


class _Lines(NamedTuple):
    """Lines of a step, as in `ModelWorkerBatch`, and of those that sample as in `LaunchedStep`."""

    rows: IntArray
    query_lens: IntArray
    num_sampled: IntArray
    seq_lens: IntArray
    input_ids: IntArray
    locs: IntArray
    rids: Int64Array
    readers: IntArray


class _Chunks(NamedTuple):
    """The lines of prompts, and what only they have."""

    lines: _Lines
    reqs: list[Req]
    sampled: list[Req]
    fresh: list[Req]
    """Those whose sampling state workers don't have."""
    pooled: PooledLines | None


class _Decodes(NamedTuple):
    """The lines of a running batch."""

    lines: _Lines
    planned: IntArray | None = None
    """int32 [n]: the most drafts of each, if any has some."""
    late: LateLines | None = None
    forced: Mapping[int, ForcedRun] = MappingProxyType({})
    """By number of the line: drafts of those with constraints."""


def build_batch(
    kv: KVManager,
    step: int,
    micro_batch: int,
    additions: Sequence[Addition],
    decode: RunningBatch | None,
    *,
    send_tokens: bool,
    whole_steps: bool = False,
    adapters: AdapterTable | None = None,
) -> tuple[ModelWorkerBatch, LaunchedStep]:
    """The step of `additions`, then of the lines of `decode`, and what the scheduler keeps of it.

    With `send_tokens`, decodes carry their token, because pipeline stages other than the last have
    no `FutureMap` entry for it; else they carry -1. With `whole_steps`, no step of these rows is in
    flight and their requests have drafts: the step needs nothing of the worker's.
    """
    decodes = None if decode is None else _decodes(kv, decode, send_tokens, whole_steps)
    chunks = _chunks(kv, additions) if additions else None
    parts = [part.lines for part in (chunks, decodes) if part is not None]
    lines = parts[0] if len(parts) == 1 else _Lines(*map(np.concatenate, zip(*parts, strict=True)))
    prefix_rows, prefix_lens, prefix_locs = _NONE, _NONE, _NONE
    if chunks is not None:
        prefix_rows, prefix_lens, prefix_locs = _prefixes(chunks.fresh)
    batch = ModelWorkerBatch(
        step,
        micro_batch,
        lines.rows,
        lines.query_lens,
        lines.num_sampled,
        lines.seq_lens,
        lines.input_ids,
        lines.locs,
        prefix_rows,
        prefix_lens,
        prefix_locs,
        [] if chunks is None else [_row_params(r, kv.speculates) for r in chunks.fresh],
        next_prompt_ids=None if chunks is None else _next_ids(chunks.reqs, len(lines.rows)),
        pooled=None if chunks is None else chunks.pooled,
        late=None if decodes is None else decodes.late,
        window_pages=kv.take_window_changes(),
    )
    if adapters is not None:
        batch.adapter_slots = adapters.take_changes()
        if not adapters.is_empty:
            batch.adapters = _adapters_of_lines([] if chunks is None else chunks.reqs, decode)
    running = [] if decode is None else decode.reqs
    if chunks is None:
        launched = LaunchedStep(step, running, running, lines.rids, lines.readers)
    else:
        reqs = chunks.reqs
        launched = LaunchedStep(
            step,
            reqs + running,
            chunks.sampled + running,
            lines.rids,
            lines.readers,
            num_landed=len(chunks.sampled),
            embedded=_embedded(chunks.pooled, reqs),
        )
        if len(reqs) == 1 and not running:
            launched.chunk = (additions[0].num_tokens, reqs[0].kv_len - additions[0].num_tokens)
        for req in chunks.fresh:
            req.installed = True
    if decodes is not None and decodes.planned is not None:
        launched.drafts = (decodes.lines.rows, decodes.planned)
        launched.forced = decodes.forced
    return batch, launched


def _chunks(kv: KVManager, additions: Sequence[Addition]) -> _Chunks:
    reqs = [a.req for a in additions]
    lens = [a.num_tokens for a in additions]
    ids = [r.fill_ids[r.kv_len : r.kv_len + n] for r, n in zip(reqs, lens, strict=True)]
    locs = kv.extend(reqs, lens)
    is_sampled = [a.last and a.req.pooling is None for a in additions]
    sampled = [r for r, samples in zip(reqs, is_sampled, strict=True) if samples]
    lines = _Lines(
        rows=_ints([r.req_pool_idx for r in reqs]),
        query_lens=_ints(lens),
        num_sampled=_ints(is_sampled),
        seq_lens=_ints([r.kv_len for r in reqs]),
        input_ids=np.concatenate(ids).astype(np.int32, copy=False),
        locs=locs,
        rids=np.array([r.rid for r in sampled], np.int64),
        readers=_ints([r.reader_no for r in sampled]),
    )
    fresh = [r for r in reqs if not r.installed]
    pooled = _pooled_lines(additions) if any(r.pooling for r in reqs) else None
    return _Chunks(lines, reqs, sampled, fresh, pooled)


def _decodes(kv: KVManager, decode: RunningBatch, send_tokens: bool, whole_steps: bool) -> _Decodes:
    rows, rids, readers = decode.rows, decode.rids, decode.readers
    after = decode.seq_lens + 1
    if decode.speculates:
        decode.alloc = kv.reserve(rows, decode.alloc, decode.targets)
    if not decode.speculates or (decode.is_exact and not decode.planned.any()):
        if decode.speculates:
            locs = kv.slot_at(rows, decode.seq_lens)
        else:
            locs = kv.decode(rows, after, decode.last_locs)
        tokens, ones = _decode_tokens(decode, send_tokens), _ONES[: len(rows)]
        return _Decodes(_Lines(rows, ones, ones, after, tokens, locs, rids, readers))
    forced: dict[int, ForcedRun] = {}
    if decode.forced:
        numbers = enumerate(rows.tolist())
        forced = {i: decode.forced[row].run for i, row in numbers if row in decode.forced}
    planned = decode.planned
    counts = planned + 1
    if whole_steps:
        known = [
            token
            for req, count in zip(decode.reqs, planned.tolist(), strict=True)
            for token in (req.output_ids[-1], *req.drafts[:count])
        ]
        locs, lens = kv.slots(rows, decode.seq_lens, counts), after + planned
        lines = _Lines(rows, counts, counts, lens, _ints(known), locs, rids, readers)
        return _Decodes(lines, planned, None, forced)
    starts, num_slots = decode.seq_lens, decode.targets - decode.seq_lens
    late = LateLines(kv.slots(rows, starts, num_slots), starts, num_slots, forced or None)
    lines = _Lines(rows, counts, counts, after, _NONE, _NONE, rids, readers)
    return _Decodes(lines, planned, late, forced)


def _prefixes(fresh: Sequence[Req]) -> tuple[IntArray, IntArray, IntArray]:
    """`prefix_rows`, `prefix_lens` and `prefix_locs` of those that begin behind a prefix."""
    reqs = [r for r in fresh if r.cached_len]
    if not reqs:
        return _NONE, _NONE, _NONE
    rows, lens = _ints([r.req_pool_idx for r in reqs]), _ints([r.cached_len for r in reqs])
    return rows, lens, np.concatenate([r.prefix_indices for r in reqs])


def _decode_tokens(decode: RunningBatch, send: bool) -> IntArray:
    if not send:
        return _UNKNOWN[: len(decode)]
    return _ints([r.output_ids[-1] for r in decode.reqs])


def _row_params(req: Req, speculates: bool) -> RowParams:
    params = req.params
    if params.prompt_logprobs is not None and not req.wants_prompt_logprobs:
        params = msgspec.structs.replace(params, prompt_logprobs=None)
    if params.constraint is not None:
        params = msgspec.structs.replace(params, constraint=None)  # workers only need masks
    return RowParams(
        row=req.req_pool_idx,
        prompt_len=req.prompt_len,
        eos_token_ids=sorted(req.stop_ids - frozenset(params.stop_token_ids)),
        params=params,
        token_ids=req.fill_ids if params.has_penalties or speculates else None,
        speculation=_speculation(req) if speculates else None,
    )


def _speculation(req: Req) -> RowSpeculation:
    # Names of keys hold no line feed, so no two pairs of key and salt are the same.
    sequence = req.sequence
    namespace = f"{req.key_name}\n{sequence.namespace}"
    return RowSpeculation(req.prompt_len + req.max_new_tokens, namespace, sequence.prediction_ids)


def _adapters_of_lines(chunks: Sequence[Req], decode: RunningBatch | None) -> IntArray | None:
    """`ModelWorkerBatch.adapters` of a step of these lines."""
    found = _ints([req.adapter_slot for req in chunks])
    if decode is not None:
        found = np.concatenate([found, decode.adapters])
    return found if (found >= 0).any() else None


def _next_ids(reqs: Sequence[Req], num_lines: int) -> IntArray | None:
    """`ModelWorkerBatch.next_prompt_ids` of a step whose first lines are those of `reqs`."""
    if not any(r.wants_prompt_logprobs for r in reqs):
        return None
    found = np.full(num_lines, -2, np.int32)
    for line, req in enumerate(reqs):
        if req.wants_prompt_logprobs:
            found[line] = req.fill_ids[req.kv_len] if req.needs_prefill else -1
    return found


def _pooled_lines(additions: Sequence[Addition]) -> PooledLines:
    mean = [i for i, a in enumerate(additions) if a.req.pooling == "mean"]
    return PooledLines(
        _ints([i for i, a in enumerate(additions) if a.last and a.req.pooling == "last"]),
        _ints(mean),
        _ints([i for i in mean if additions[i].last]),
    )


def _embedded(pooled: PooledLines | None, reqs: Sequence[Req]) -> list[Req]:
    if pooled is None:
        return []
    return [reqs[i] for i in (*pooled.last.tolist(), *pooled.mean_ends.tolist())]


def _ints(values: Sequence[int]) -> IntArray:
    return np.asarray(values, np.int32)
