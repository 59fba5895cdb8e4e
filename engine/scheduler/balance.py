"""Keeping a pipeline's micro-batches equally full.

The fullest micro-batch sets the pace: its steps pass the stages one after another, and the others
wait for it (vLLM #41682: all requests in the first micro-batch, and pipelining gives nothing).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.scheduler.micro_batch import LaunchedStep, MicroBatch
from engine.scheduler.req import Req, ReqStatus

LOPSIDED = 2
"""A micro-batch is lopsided if it exceeds its share by at least this many requests and by at least
half its share. Then decoding requests are moved away too."""


def fair_share(num_reqs: int, micro_batches: Sequence[MicroBatch]) -> int:
    """Requests that each micro-batch should have at most."""
    return -(-num_reqs // len(micro_batches))


def open_places(num_held: int, share: int, limit: int) -> int:
    """Requests that a step may admit if its micro-batch holds `num_held`; at most `limit` in all.

    `share` spreads a burst, so that all stages get work at once. One request may always come: it
    needn't wait for an emptier micro-batch, because `rebalance` moves it there.
    """
    return min(limit - num_held, max(share - num_held, 1))


def rebalance(
    micro_batches: Sequence[MicroBatch], mb: MicroBatch, step: LaunchedStep, limit: int
) -> None:
    """Move requests of `step`, just committed, from `mb` to emptier micro-batches.

    A request joins the micro-batch whose step computes the end of its prompt, so that a prompt
    never waits for one certain micro-batch. That alone would be lopsided: with four micro-batches,
    all prompts of four chunks end in the same one. A request that moves waits once for the turn of
    its new micro-batch: at most the time that the others take for a step each.

    Requests that have just started always move if that helps. Those that decode move only from a
    micro-batch that is lopsided or above its `limit`, or to one that would stay idle.
    """
    counts = [len(m.running) for m in micro_batches]
    if counts[mb.index] - min(counts) < 2 or mb.in_flight:
        return
    share = fair_share(sum(counts), micro_batches)
    surplus = counts[mb.index] - share
    idle = any(not m.in_flight and len(m.running) == 0 for m in micro_batches)
    movable = _still_running(step.sampled[: step.num_landed])
    if idle or surplus >= max(LOPSIDED, share // 2) or counts[mb.index] > limit:
        # Those that started last have waited least.
        decoding = _still_running(step.sampled[step.num_landed :])
        movable += decoding[::-1][: max(surplus - len(movable), 0)]
    moves: dict[int, list[Req]] = {}
    for req in movable:
        target = _emptiest(counts, mb.index)
        if counts[mb.index] - counts[target] < 2:
            break
        moves.setdefault(target, []).append(req)
        counts[target] += 1
        counts[mb.index] -= 1
    for target, reqs in moves.items():
        mb.running.move(reqs, micro_batches[target].running)


def _emptiest(counts: Sequence[int], current: int) -> int:
    """Index of the micro-batch with the fewest requests; of several, the one whose turn is next."""
    size = len(counts)
    turns = [(current + offset) % size for offset in range(1, size)]
    return min(turns, key=lambda index: counts[index])


def _still_running(reqs: Sequence[Req]) -> list[Req]:
    return [r for r in reqs if r.status is ReqStatus.RUNNING]
