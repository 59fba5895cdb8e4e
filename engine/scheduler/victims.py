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
        running = {id(r) for r in mb.reqs}
        for step in mb.in_flight:
            ending = itertools.chain(step.sampled, step.embedded)
            if any(id(r) not in running and not r.finished for r in ending):
                return True
    return False


def retraction_victim(
    mb: MicroBatch, micro_batches: Sequence[MicroBatch], chunked: Sequence[Req]
) -> Req | None:
    """The request to send back to the queue, or None if only one request is left.

    Flex requests come first, then the least important one, then the one that loses least progress:
    fewest outputs, longest input (SGLang). Rows of `mb` are preferred, because they need the room
    now. `chunked` are the requests whose prompts are partly launched.
    """
    own = mb.reqs
    others = [r for m in micro_batches if m is not mb for r in m.reqs]
    everyone = [*own, *others, *chunked]
    candidates = [r for r in own if r.is_flex] or [r for r in everyone if r.is_flex]
    if not candidates or len(everyone) == 1:
        candidates = list(own) if len(own) > 1 else others or list(chunked)
    return max(candidates, key=_cheapest, default=None)


def flex_victims(
    mb: MicroBatch, micro_batches: Sequence[MicroBatch], chunked: Req | None
) -> list[Req]:
    """All flex requests that hold room, in the order in which they leave: those of `mb` first, of
    these the paused ones, and so on as in `retraction_victim`."""
    found: list[Req] = []
    for m in sorted(micro_batches, key=lambda m: m is not mb):
        flex = [r for r in m.running.reqs if r.is_flex] if m.running.num_flex else []
        found += sorted(m.paused.reqs, key=_cheapest, reverse=True)
        found += sorted(flex, key=_cheapest, reverse=True)
    return found if chunked is None else [*found, chunked]


def _cheapest(req: Req) -> tuple[int, ...] | tuple[float, ...]:
    outputs = len(req.output_ids)
    return (req.sequence.priority, -outputs, req.prompt_len, req.arrival, req.rid)


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
            for r in m.reqs
            if r.sequence.priority > req.sequence.priority
            and r.key_name == req.key_name
            and r.is_flex == req.is_flex
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
