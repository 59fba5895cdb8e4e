"""Kernels of `engine.sampling.triton_backend`, in Triton: only a CUDA build of torch brings it.

Tokens have the order of `engine.sampling.token_order`: that of the float bits of (row maximum -
logit), then of the id. What top_k and top_p keep is a prefix of it. A token that the noise chooses
among all tokens is also its choice in any set that holds it. So nothing is sorted: if the chosen
token lies beyond the prefix, the token to find is the noise's choice among those before it.

A row is cut into chunks, whose largest logits are kept. They tell where the likeliest tokens are:
the first k tokens lie in the first k chunks, in the order of their largest logits, then of their
place. (Each chunk before that of a token x holds a token before x.) So of most rows with top_k or
top_p little is read again.

Places are 64-bit numbers whose larger one wins: 32 bits of a value's order, then (2**31 - 1 - id).
So of equal values the first wins, as in torch, and the result doesn't depend on how a row was
split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling import hash_noise
from engine.sampling.hash_noise import signed

_GOLDEN64 = tl.constexpr(signed(hash_noise.GOLDEN64, 64))
_SPLITMIX_A = tl.constexpr(signed(hash_noise.SPLITMIX_A, 64))
_SPLITMIX_B = tl.constexpr(signed(hash_noise.SPLITMIX_B, 64))
_GOLDEN32 = tl.constexpr(signed(hash_noise.GOLDEN32, 32))
_LOWBIAS_A = tl.constexpr(hash_noise.LOWBIAS_A)
_LOWBIAS_B = tl.constexpr(signed(hash_noise.LOWBIAS_B, 32))
_ODD_NEGATIVE = tl.constexpr(hash_noise.ODD_NEGATIVE)
_SCALE = tl.constexpr(hash_noise.SCALE)
_LOWEST32 = tl.constexpr(-(2**31))
_LOWEST64 = tl.constexpr(-(2**63))
_LOW_BITS = tl.constexpr(2**31 - 1)
_INF = tl.constexpr(float("inf"))
_INF_BITS = tl.constexpr(0x7F800000)
_UNALIGNED = ("floats", "ints", "rows", "positions", "token_ids", "max_logit")
"""Of these the address changes from step to step; a kernel must not be compiled anew for it."""
_BEYOND = tl.constexpr(2**31 - 1)
"""A distance behind all tokens, and a top_k that keeps all."""


@triton.jit
def _place(order, ids):
    return (order.to(tl.int64) << 32) | (ids ^ _LOW_BITS).to(tl.int64)


@triton.jit
def _id_at(place):
    return (place & _LOW_BITS).to(tl.int32) ^ _LOW_BITS


@triton.jit
def _order_of(x):
    """int32 that orders like the float32 `x`: -0.0 as 0.0, and NaN above all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & _LOW_BITS), _LOW_BITS)


@triton.jit
def _logit_at(place):
    """The logit of a place in the order of `_order_of`; NaN for the highest."""
    order = (place >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & _LOW_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def _best_of(places, line, splits, SPLITS: tl.constexpr):
    """The highest place of a line's `splits`."""
    numbers = tl.arange(0, SPLITS)
    found = tl.load(places + line * SPLITS + numbers, mask=numbers < splits, other=_LOWEST64)
    return tl.max(found, axis=0)


@triton.jit
def _log(x):
    """log(x) of a normal positive float32 with a relative error below 2e-7, also next to 1, where
    the hardware's has none (Cephes; engine/csrc/noise.h)."""
    # x = 2^n (1 + r), and 1 + r lies between the roots of 1/2 and 2.
    above = x.to(tl.int32, bitcast=True) - 0x3F3504F3
    n = (above >> 23).to(tl.float32)
    r = ((above & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    p = 7.0376836292e-2 * r - 1.1514610310e-1
    p = p * r + 1.1676998740e-1
    p = p * r - 1.2420140846e-1
    p = p * r + 1.4249322787e-1
    p = p * r - 1.6668057665e-1
    p = p * r + 2.0000714765e-1
    p = p * r - 2.4999993993e-1
    p = p * r + 3.3333331174e-1
    square = r * r
    p = n * -2.12194440e-4 + p * r * square
    return n * 0.693359375 + (r + (square * -0.5 + p))


@triton.jit
def _row_key(mixed_seed, position):
    """`HashNoise.row_keys`, int64."""
    z = position * _GOLDEN64 + mixed_seed
    z = (z ^ (z >> 30)) * _SPLITMIX_A
    z = (z ^ (z >> 27)) * _SPLITMIX_B
    return z ^ (z >> 31)


@triton.jit
def _uniform(key, ids):
    """`HashNoise.uniform` of the tokens `ids` int32, the same bits."""
    x = ((ids * _GOLDEN32) & _LOW_BITS) ^ key.to(tl.int32)
    x = (x ^ (x >> 16)) * _LOWBIAS_A
    x = x ^ (key >> 32).to(tl.int32)
    x = (x ^ (x >> 15)) * _LOWBIAS_B
    return (x | _ODD_NEGATIVE).to(tl.float32) * _SCALE


@triton.jit
def _exponential(key, ids):
    """`HashNoise.minus_exponential`, negated: up to rounding."""
    return 0.0 - _log(_uniform(key, ids))


@triton.jit
def _load(logits, line, ids, VOCAB: tl.constexpr):
    """float32 logits of a line; -inf beyond the vocabulary."""
    return tl.load(logits + line * VOCAB + ids, mask=ids < VOCAB, other=-_INF).to(tl.float32)


@triton.jit
def _weight(x, top, inverse_temperature, min_p):
    """p / max(p) of logits `x`; 0 for tokens that min_p drops."""
    p = tl.exp((x - top) * inverse_temperature)
    return tl.where(p >= min_p, p, 0.0)


@triton.jit
def _distance(x, top):
    """The high half of a token's sort key: int32, the larger the less likely."""
    return (top - x).to(tl.int32, bitcast=True)


@triton.jit
def _top_k_of(ints, row, VOCAB: tl.constexpr):
    """A row's top_k, `_BEYOND` if it keeps all; 1 or 0 if the row is greedy."""
    top_k = tl.load(ints + row * 2 + 1)
    return tl.where(top_k < VOCAB, top_k, _BEYOND).to(tl.int32)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=_UNALIGNED)
def find_peaks(
    peaks,
    tops,
    logits,
    floats,
    ints,
    rows,
    blocks,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`peaks` int64 [lines, SPLITS]: the place of each split's largest logit, or of its first NaN.
    `tops` float32 [lines, VOCAB / CHUNK, rounded up]: each chunk's, of lines with top_k or top_p.

    `floats` and `ints` are those of `DrawTable`. Grid: lines, splits of `blocks` blocks each.
    """
    line = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    num_chunks = (VOCAB + CHUNK - 1) // CHUNK
    row = tl.load(rows + line)
    top_k = _top_k_of(ints, row, VOCAB)
    wants_tops = (top_k > 1) & ((top_k < VOCAB) | (tl.load(floats + row * 3 + 1) <= 1.0))
    num_wanted = tl.where(wants_tops, num_chunks, 0)
    places = tl.arange(0, BLOCK // CHUNK)
    lanes = places[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    best = tl.full([BLOCK // CHUNK, CHUNK], _LOWEST32, tl.int32)
    best_ids = tl.zeros([BLOCK // CHUNK, CHUNK], tl.int32)
    begin = split * blocks * BLOCK
    for start in range(begin, begin + blocks * BLOCK, BLOCK):
        ids = start + lanes
        x = _load(logits, line, ids, VOCAB)
        chunks = start // CHUNK + places
        tl.store(
            tops + line * num_chunks + chunks,
            tl.max(x, axis=1),
            mask=chunks < num_wanted,
        )
        order = _order_of(x)
        better = order > best
        best = tl.where(better, order, best)
        best_ids = tl.where(better, ids, best_ids)
    place = tl.max(tl.max(_place(best, best_ids), axis=1), axis=0)
    tl.store(peaks + line * SPLITS + split, place)


@triton.jit(do_not_specialize=["blocks", "splits"], do_not_specialize_on_alignment=_UNALIGNED)
def run_races(
    races,
    masses,
    logits,
    peaks,
    floats,
    ints,
    rows,
    positions,
    blocks,
    splits,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PICKED: tl.constexpr,
):
    """`races` int64 [lines, SPLITS]: the place of each split's largest p / E, of lines that draw
    from more than PICKED tokens. `masses` float64 [lines, SPLITS]: its sum of p / max(p).

    Grid: lines, splits.
    """
    line = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(rows + line)
    if _top_k_of(ints, row, VOCAB) > PICKED:
        top = _logit_at(_best_of(peaks, line, splits, SPLITS))
        inverse_temperature = tl.load(floats + row * 3)
        min_p = tl.load(floats + row * 3 + 2)
        key = _row_key(tl.load(ints + row * 2), tl.load(positions + line))
        lanes = tl.arange(0, BLOCK)
        best = tl.full([BLOCK], -1, tl.int32)
        best_ids = tl.zeros([BLOCK], tl.int32)
        mass = tl.zeros([BLOCK], tl.float64)
        begin = split * blocks * BLOCK
        for start in range(begin, begin + blocks * BLOCK, BLOCK):
            ids = start + lanes
            p = _weight(_load(logits, line, ids, VOCAB), top, inverse_temperature, min_p)
            mass += p.to(tl.float64)
            order = (p / _exponential(key, ids)).to(tl.int32, bitcast=True)
            better = order > best
            best = tl.where(better, order, best)
            best_ids = tl.where(better, ids, best_ids)
        tl.store(races + line * SPLITS + split, tl.max(_place(best, best_ids), axis=0))
        tl.store(masses + line * SPLITS + split, tl.sum(mass, axis=0))


@triton.jit
def _kth(distances, k):
    """The k-th smallest of `distances` int32 [n], each at most that of -inf or `_BEYOND`."""
    low = 0
    high = _INF_BITS
    while low < high:
        middle = low + (high - low) // 2
        if tl.sum((distances <= middle).to(tl.int32), axis=0) >= k:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _count_up_to(logits, line, top, bound, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have a distance of at most `bound`."""
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + lanes
        distance = _distance(_load(logits, line, ids, VOCAB), top)
        count += ((distance <= bound) & (ids < VOCAB)).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _mass_of_first(
    logits, line, top, inverse_temperature, min_p, top_k, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of p / max(p) of the `top_k` likeliest tokens, float64."""
    low = 0
    high = _INF_BITS
    while low < high:
        middle = low + (high - low) // 2
        if _count_up_to(logits, line, top, middle, VOCAB, BLOCK) >= top_k:
            high = middle
        else:
            low = middle + 1
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, VOCAB, BLOCK):
        x = _load(logits, line, start + lanes, VOCAB)
        nearer = _distance(x, top) < low
        count += nearer.to(tl.int32)
        p = _weight(x, top, inverse_temperature, min_p)
        mass += tl.where(nearer, p, 0.0).to(tl.float64)
    # The last tokens of the top_k lie at the same distance.
    last = _weight(0.0 - low.to(tl.float32, bitcast=True), 0.0, inverse_temperature, min_p)
    rest = (top_k - tl.sum(count, axis=0)).to(tl.float64)
    return tl.sum(mass, axis=0) + rest * last.to(tl.float64)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=_UNALIGNED)
def settle(
    token_ids,
    max_logit,
    picked,
    logits,
    peaks,
    tops,
    races,
    masses,
    floats,
    ints,
    rows,
    positions,
    splits,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PICKED: tl.constexpr,
):
    """`token_ids` int64 [lines] and `max_logit` float32 [lines] from what the other kernels found.

    Of lines with top_k or top_p up to PICKED chunks are read again. If the chosen token's place
    needs more, all logits are, once for each token that is tried. CHUNKS is a power of two, at
    least the number of chunks. `picked` int32 [lines, PICKED] is working memory. Grid: lines.
    """
    line = tl.program_id(0).to(tl.int64)
    num_chunks = (VOCAB + CHUNK - 1) // CHUNK
    row = tl.load(rows + line)
    peak = _best_of(peaks, line, splits, SPLITS)
    top = _logit_at(peak)
    tl.store(max_logit + line, top)
    chosen = _id_at(peak)
    top_k = _top_k_of(ints, row, VOCAB)
    top_p = tl.load(floats + row * 3 + 1)
    if (top_k > 1) & (tl.abs(top) < _INF):
        if top_k > PICKED:
            chosen = _id_at(_best_of(races, line, splits, SPLITS))
        if (top_k < VOCAB) | (top_p <= 1.0):
            inverse_temperature = tl.load(floats + row * 3)
            min_p = tl.load(floats + row * 3 + 2)
            key = _row_key(tl.load(ints + row * 2), tl.load(positions + line))
            numbers = tl.arange(0, CHUNKS)
            tops_of_line = tl.load(
                tops + line * num_chunks + numbers, mask=numbers < num_chunks, other=-_INF
            )
            chunk_distances = tl.where(numbers < num_chunks, _distance(tops_of_line, top), _BEYOND)
            limit = tl.full((), _INF, tl.float64)
            searching = True
            if top_k <= PICKED:
                wanted = tl.minimum(top_k, num_chunks)
                edge = _kth(chunk_distances, wanted)
            else:
                if top_p <= 1.0:
                    if top_k < VOCAB:
                        total = _mass_of_first(
                            logits, line, top, inverse_temperature, min_p, top_k, VOCAB, BLOCK
                        )
                    else:
                        splits_of_line = tl.arange(0, SPLITS)
                        total = tl.sum(
                            tl.load(
                                masses + line * SPLITS + splits_of_line,
                                mask=splits_of_line < splits,
                                other=0.0,
                            ),
                            axis=0,
                        )
                    limit = top_p.to(tl.float64) * total
                bound = _distance(tl.load(logits + line * VOCAB + chosen).to(tl.float32), top)
                wanted = tl.sum((chunk_distances <= bound).to(tl.int32), axis=0)
                lanes = tl.arange(0, BLOCK)
                while searching & (wanted > PICKED):
                    count = tl.zeros([BLOCK], tl.int32)
                    mass = tl.zeros([BLOCK], tl.float64)
                    best = tl.full([BLOCK], -1, tl.int32)
                    best_ids = tl.zeros([BLOCK], tl.int32)
                    for start in range(0, VOCAB, BLOCK):
                        ids = start + lanes
                        x = _load(logits, line, ids, VOCAB)
                        distance = _distance(x, top)
                        before = (distance < bound) | ((distance == bound) & (ids < chosen))
                        count += before.to(tl.int32)
                        p = _weight(x, top, inverse_temperature, min_p)
                        p = tl.where(before, p, 0.0)
                        mass += p.to(tl.float64)
                        order = (p / _exponential(key, ids)).to(tl.int32, bitcast=True)
                        better = before & (order > best)
                        best = tl.where(better, order, best)
                        best_ids = tl.where(better, ids, best_ids)
                    rank = tl.sum(count, axis=0)
                    searching = (rank >= top_k) | ((rank > 0) & (tl.sum(mass, axis=0) >= limit))
                    if searching:
                        chosen = _id_at(tl.max(_place(best, best_ids), axis=0))
                        bound = _distance(
                            tl.load(logits + line * VOCAB + chosen).to(tl.float32), top
                        )
                        wanted = tl.sum((chunk_distances <= bound).to(tl.int32), axis=0)
                edge = bound
            if searching:
                nearer = chunk_distances < edge
                tied = chunk_distances == edge
                room = wanted - tl.sum(nearer.to(tl.int32), axis=0)
                chosen_chunks = nearer | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= room))
                slots = tl.cumsum(chosen_chunks.to(tl.int32), axis=0) - 1
                tl.store(picked + line * PICKED + slots, numbers, mask=chosen_chunks)
                tl.debug_barrier()
                cells = tl.arange(0, PICKED * CHUNK)
                known = cells // CHUNK < wanted
                ids = tl.load(picked + line * PICKED + cells // CHUNK, mask=known, other=0)
                ids = ids * CHUNK + cells % CHUNK
                known = known & (ids < VOCAB)
                x = tl.load(logits + line * VOCAB + ids, mask=known, other=-_INF).to(tl.float32)
                distance = tl.where(known, _distance(x, top), _BEYOND)
                p = _weight(x, top, inverse_temperature, min_p)
                order = (p / _exponential(key, ids)).to(tl.int32, bitcast=True)
                if top_k <= PICKED:
                    if top_p <= 1.0:
                        last = _kth(distance, top_k)
                        within = distance < last
                        rest = top_k - tl.sum(within.to(tl.int32), axis=0)
                        # The last tokens of the top_k lie at the same distance.
                        p_last = _weight(
                            0.0 - last.to(tl.float32, bitcast=True), 0.0, inverse_temperature, min_p
                        )
                        total = tl.sum(tl.where(within, p, 0.0).to(tl.float64), axis=0)
                        total += rest.to(tl.float64) * p_last.to(tl.float64)
                        limit = top_p.to(tl.float64) * total
                    places = tl.where(known, _place(order, ids), _LOWEST64)
                    chosen = _id_at(tl.max(places, axis=0))
                while searching:
                    bound = _distance(tl.load(logits + line * VOCAB + chosen).to(tl.float32), top)
                    before = (distance < bound) | ((distance == bound) & (ids < chosen))
                    rank = tl.sum(before.to(tl.int32), axis=0)
                    mass = tl.sum(tl.where(before, p, 0.0).to(tl.float64), axis=0)
                    searching = (rank >= top_k) | ((rank > 0) & (mass >= limit))
                    if searching:
                        places = tl.where(before, _place(order, ids), _LOWEST64)
                        chosen = _id_at(tl.max(places, axis=0))
    tl.store(token_ids + line, chosen.to(tl.int64))
