"""Which requests leave when KV room runs out. This only chooses; the scheduler acts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from engine.scheduler.micro_batch import MicroBatch
from engine.scheduler.req import Req


def ends_in_flight(micro_batches: Sequence[MicroBatch]) -> bool:
    """Whether a step in flight carries the last token that some request may have, or an embedding.

    The result of that step frees room: to skip a decode step is cheaper than to retract.
    """
    for mb in micro_batches:
        running = {id(r) for r in mb.running.reqs}
        for step in mb.in_flight:
            ending = itertools.chain(step.sampled, step.embedded)
            if any(id(r) not in running and not r.finished for r in ending):
                return True
    return False


def retraction_victim(
    mb: MicroBatch, micro_batches: Sequence[MicroBatch], chunked: Req | None
) -> Req | None:
    """The request to send back to the queue, or None if only one request is left.

    The least important one comes first, then the one that loses least progress: fewest outputs,
    longest input (SGLang). Rows of `mb` are preferred, because they need the room now.
    """
    own = mb.running.reqs
    others = [r for m in micro_batches if m is not mb for r in m.running.reqs]
    candidates = list(own) if len(own) > 1 else others
    if not candidates and chunked is not None:
        candidates = [chunked]
    return max(
        candidates,
        key=lambda r: (r.sequence.priority, -len(r.output_ids), r.prompt_len, r.arrival, r.rid),
        default=None,
    )


def preemption_victims(
    req: Req,
    micro_batches: Sequence[MicroBatch],
    wanted: Sequence[tuple[int, Callable[[Req], int]]],
    need_row: bool,
) -> list[Req]:
    """Running requests less important than `req` whose retraction makes it fit; [] if none do.

    Only those that came with the same API key: priorities order a key's own requests. The least
    important and latest ones come first. `wanted` has tokens that must become free, and how many of
    them the end of a request frees; a row must become free if `need_row`.
    """
    victims = sorted(
        (
            r
            for m in micro_batches
            for r in m.running.reqs
            if r.sequence.priority > req.sequence.priority and r.key_name == req.key_name
        ),
        key=lambda r: (r.sequence.priority, r.arrival, r.rid),
        reverse=True,
    )
    chosen: list[Req] = []

    def is_enough() -> bool:
        return all(missing <= sum(map(frees, chosen)) for missing, frees in wanted)

    for victim in victims:
        if is_enough() and (chosen or not need_row):
            break
        chosen.append(victim)
    return chosen if is_enough() else []
