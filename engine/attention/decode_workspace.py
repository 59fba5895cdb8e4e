"""Contiguous copies of the running sequences' keys and values, for decoding on CPU.

Gathering a paged cache costs as much memory traffic as attending to it, and one call per sequence
costs more than a short sequence's attention. So each decoding request keeps a float32 copy of its
keys and values here: filled from the pool when it starts to decode, then one token appended per
step. The pool stays the truth; anything here can be dropped and filled again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionInputs
from engine.protocol.step import Int64Array

_FIRST_CAPACITY = 64


def _capacities(longest: int) -> Int64Array:
    """Buckets' capacities: four per doubling, at least 16 apart, up to `longest` or just above."""
    sizes = [_FIRST_CAPACITY]
    while sizes[-1] < longest:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + octave // 4)
    return np.array(sizes, dtype=np.int64)


@dataclass
class _Bucket:
    """Storage of requests with up to `capacity` tokens.

    `owner[place]` is the request row whose data lies there, -1 if none. `active` places were used
    by the last step of the bucket's micro-batch.
    """

    capacity: int
    owner: Int64Array
    keys: list[Tensor]
    values: list[Tensor]
    num_bytes: int
    active: int = 0


@dataclass
class _Layout:
    """Where a group's tokens go in all layers that have the same window."""

    key_cells: Tensor
    """int64 [n * Hkv * D]: cells of a bucket's flat keys where this step's token goes."""
    value_rows: Tensor
    """int64 [n * Hkv]: the same for its values, counted in rows of D."""
    scores: Tensor
    """float32 [n * Hkv, G, width]: scratch, so that layers don't allocate it anew."""
    width: int
    """Columns in use by the longest sequence."""
    mask: Tensor | None
    """float32 [n, 1, 1, width], -inf past each sequence's end; None if all are equally long."""
    fills: list[tuple[int, Tensor]]
    """(place, pool slots in column order) of sequences to copy from the pool."""


@dataclass
class _Group:
    """The decodes of one bucket in one step; they have places [0, n)."""

    bucket: _Bucket
    rows: Tensor
    """int64 [n]: decode of each place."""
    is_whole_step: bool
    """Whether place i is decode i and the step has no other rows."""
    layouts: dict[int | None, _Layout]


@dataclass
class DecodePlan:
    """One step's decodes: groups in buckets, and the rows that found no room."""

    groups: list[_Group] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)


class DecodeWorkspace:
    """Buckets of copies, at most `budget_bytes` in all.

    Requests of similar length share a bucket, so that one batched matrix product serves them all
    and padding stays below a quarter. Keys lie transposed, [places, heads, head_dim, capacity],
    values [places, heads, capacity, head_dim]. In a layer with a sliding window the capacity is at
    most the window and token t lies in column t % window: attention doesn't care about the order of
    keys.
    """

    def __init__(self, inputs: AttentionInputs, budget_bytes: int) -> None:
        self.inputs = inputs
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        num_rows, longest = inputs.req_to_token.shape
        self.capacities = _capacities(longest)
        self.windows = {layer.call.window for layer in inputs.layers}
        self.call = inputs.layers[0].call
        """Whose sizes all have."""
        # By request row: micro-batch, bucket, place and token count of its copy; -1 = no copy.
        self._batch_of = np.zeros(num_rows, dtype=np.int64)
        self._bucket_of = np.zeros(num_rows, dtype=np.int64)
        self._place_of = np.zeros(num_rows, dtype=np.int64)
        self._copied = np.full(num_rows, -1, dtype=np.int64)
        self._buckets: dict[tuple[int, int], _Bucket] = {}

    def invalidate(self, rows: Int64Array) -> None:
        """Forget the copies of request `rows`, whose tokens changed other than by decoding."""
        self._copied[rows] = -1

    def plan(self, rows: Int64Array, seq_lens: Int64Array, micro_batch: int) -> DecodePlan:
        """Places for one step's decodes: request `rows` [n] with `seq_lens` [n] tokens.

        A row keeps its place if its copy lacks just this step's token and the place is below the
        number of rows in its bucket; the others are filled into the places that are left.
        """
        plan = DecodePlan()
        index = np.searchsorted(self.capacities, seq_lens)
        kept = self._copied[rows] == seq_lens - 1
        kept &= self._batch_of[rows] == micro_batch
        kept &= seq_lens <= self.capacities[self._bucket_of[rows]]
        index = np.where(kept, self._bucket_of[rows], index)
        present = np.unique(index).tolist()
        for (owner_batch, number), bucket in self._buckets.items():
            if owner_batch == micro_batch and number not in present:
                bucket.active = 0
        for number in present:
            members = np.flatnonzero(index == number)
            bucket_or_none = self._reserve(micro_batch, number, len(members))
            if bucket_or_none is None:
                self._copied[rows[members]] = -1
                plan.rest.extend(members.tolist())
                continue
            self._batch_of[rows[members]] = micro_batch
            plan.groups.append(self._place(bucket_or_none, number, members, rows, seq_lens, kept))
        return plan

    def attend(
        self, group: _Group, layer_id: int, window: int | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Append this step's contiguous k, v [n, Hkv, D] and attend with scaled q [n, Hkv, G, D].

        Rows in place order; float32. Returns [n, Hkv * G * D].
        """
        layout = group.layouts[window]
        keys, values = group.bucket.keys[layer_id], group.bucket.values[layer_id]
        for place, slots in layout.fills:
            self._fill(keys[place], values[place], layer_id, slots)
        n, heads, group_size, dim = q.shape
        width, capacity = layout.width, keys.shape[-1]
        batched = n * heads
        keys.view(-1).put_(layout.key_cells, k)
        values.view(-1, dim).index_copy_(0, layout.value_rows, v.view(batched, dim))
        scores = layout.scores
        torch.bmm(
            q.view(batched, group_size, dim),
            keys.view(-1, dim, capacity)[:batched, :, :width],
            out=scores,
        )
        if layout.mask is not None:
            scores.view(n, heads, group_size, width).add_(layout.mask)
        torch.softmax(scores, dim=-1, out=scores)
        out = torch.bmm(scores, values.view(-1, capacity, dim)[:batched, :width])
        return out.view(n, heads * group_size * dim)

    def _place(
        self,
        bucket: _Bucket,
        number: int,
        members: Int64Array,
        rows: Int64Array,
        seq_lens: Int64Array,
        kept: np.ndarray,
    ) -> _Group:
        n = len(members)
        member_rows = rows[members]
        places = self._place_of[member_rows]
        stays = kept[members] & (places < n)
        stays[stays] = bucket.owner[places[stays]] == member_rows[stays]
        free = np.ones(n, dtype=np.bool_)
        free[places[stays]] = False
        places[~stays] = np.flatnonzero(free)
        bucket.active = n
        bucket.owner[places] = member_rows
        self._bucket_of[member_rows] = number
        self._place_of[member_rows] = places
        self._copied[member_rows] = seq_lens[members]
        order = np.empty(n, dtype=np.int64)
        order[places] = members
        ordered_lens = seq_lens[order]
        new_places = np.sort(places[~stays]).tolist()
        return _Group(
            bucket=bucket,
            rows=torch.from_numpy(order),
            is_whole_step=n == len(rows) and bool((order == np.arange(n)).all()),
            layouts={
                window: self._layout(
                    _columns(bucket.capacity, window), window, ordered_lens, new_places, rows[order]
                )
                for window in self.windows
            },
        )

    def _layout(
        self,
        capacity: int,
        window: int | None,
        seq_lens: Int64Array,
        new_places: list[int],
        rows: Int64Array,
    ) -> _Layout:
        columns = seq_lens - 1
        counts = seq_lens
        if window is not None:
            columns = columns % window
            counts = np.minimum(counts, window)
        width = int(counts.max())
        mask: Tensor | None = None
        if int(counts.min()) < width:
            past_end = torch.arange(width) >= torch.from_numpy(counts).unsqueeze(1)
            mask = torch.zeros(past_end.shape).masked_fill_(past_end, -torch.inf)[:, None, None, :]
        fills = [
            (place, self._slots(int(rows[place]), int(seq_lens[place]), window))
            for place in new_places
        ]
        heads, dim = self.call.num_kv_heads, self.call.k_dim
        n = len(rows)
        head_rows = np.arange(n * heads).reshape(n, heads)
        value_rows = head_rows * capacity + columns[:, None]
        key_cells = (head_rows[..., None] * dim + np.arange(dim)) * capacity + columns[
            :, None, None
        ]
        return _Layout(
            key_cells=torch.from_numpy(key_cells.reshape(-1)),
            value_rows=torch.from_numpy(value_rows.reshape(-1)),
            scores=torch.empty(n * heads, self.call.num_heads // heads, width),
            width=width,
            mask=mask,
            fills=fills,
        )

    def _slots(self, row: int, seq_len: int, window: int | None) -> Tensor:
        slots = self.inputs.table_within(window)[row, :seq_len]
        if window is None or seq_len <= window:
            return slots
        # Column c holds the last token t with t % window == c.
        return slots[seq_len - window :].roll(seq_len % window)

    def _fill(self, keys: Tensor, values: Tensor, layer_id: int, slots: Tensor) -> None:
        """keys [Hkv, D, capacity], values [Hkv, capacity, D] of one place; the rest becomes 0.

        Masked columns still enter the sums with weight 0, so they must be finite.
        """
        kv = self.inputs.pool.gather(layer_id, slots, keys.dtype)
        count = slots.shape[0]
        keys[..., :count] = kv.k.permute(1, 2, 0)
        values[:, :count] = kv.v.transpose(0, 1)
        keys[..., count:] = 0
        values[:, count:] = 0

    def _reserve(self, micro_batch: int, number: int, places: int) -> _Bucket | None:
        """The bucket with room for `places`, or None if the budget doesn't allow it."""
        key = (micro_batch, number)
        bucket = self._buckets.get(key)
        if bucket is not None and len(bucket.owner) >= places:
            return bucket
        if bucket is not None:
            self._drop(key)
        capacity = int(self.capacities[number])
        grown = 1 << (places - 1).bit_length()
        for rows in (grown, places):
            size = rows * self._bytes_per_place(capacity)
            if self._make_room(size):
                bucket = self._allocate(capacity, rows, size)
                self._buckets[key] = bucket
                self.used_bytes += size
                return bucket
        return None

    def _make_room(self, size: int) -> bool:
        for key in [key for key, bucket in self._buckets.items() if bucket.active == 0]:
            if self.used_bytes + size <= self.budget_bytes:
                break
            self._drop(key)
        return self.used_bytes + size <= self.budget_bytes

    def _drop(self, key: tuple[int, int]) -> None:
        self.used_bytes -= self._buckets.pop(key).num_bytes

    def _bytes_per_place(self, capacity: int) -> int:
        columns = sum(_columns(capacity, layer.call.window) for layer in self.inputs.layers)
        return 4 * self.call.kv_size * columns

    def _allocate(self, capacity: int, places: int, num_bytes: int) -> _Bucket:
        heads, dim = self.call.num_kv_heads, self.call.k_dim
        widths = [_columns(capacity, layer.call.window) for layer in self.inputs.layers]
        return _Bucket(
            capacity=capacity,
            owner=np.full(places, -1, dtype=np.int64),
            keys=[torch.empty(places, heads, dim, width) for width in widths],
            values=[torch.empty(places, heads, width, dim) for width in widths],
            num_bytes=num_bytes,
        )


def _columns(capacity: int, window: int | None) -> int:
    return capacity if window is None else min(capacity, window)
