"""Which experts stand together, so that groups of ranks have equal work: algorithms for it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeAlias

Counts: TypeAlias = Sequence[Sequence[int]]
"""[layers][experts]: tokens that each expert got."""
Placement: TypeAlias = list[list[list[int]]]
"""[layers][groups]: the experts of a group, as many in each."""
Balancer: TypeAlias = Callable[[Counts, int], Placement]
"""Places the experts of each layer on a number of groups that divides their number."""


def pack_greedily(counts: Counts, num_groups: int) -> Placement:
    """Experts with most tokens first, each to the group that has fewest tokens and room (longest
    processing time first: Graham 1969)."""
    return [_pack(tokens, num_groups) for tokens in counts]


def _pack(tokens: Sequence[int], num_groups: int) -> list[list[int]]:
    room = len(tokens) // num_groups
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    lightest = [(0, group) for group in range(num_groups)]  # a heap: equal ones by number
    for expert in sorted(range(len(tokens)), key=lambda number: -tokens[number]):
        load, group = heapq.heappop(lightest)
        groups[group].append(expert)
        if len(groups[group]) < room:
            heapq.heappush(lightest, (load + tokens[expert], group))
    return [sorted(group) for group in groups]


def in_order(counts: Counts, num_groups: int) -> Placement:
    """The first experts in the first group, and so on: what stands without a map."""
    return [_slices(len(tokens), len(tokens) // num_groups) for tokens in counts]


def _slices(num_experts: int, size: int) -> list[list[int]]:
    return [list(range(first, first + size)) for first in range(0, num_experts, size)]


def busiest(counts: Counts, placement: Placement) -> float:
    """How long the layers take if a group takes a time for each token, and each layer waits for its
    busiest group: over what it would be if all groups had the same. 1.0 without tokens."""
    longest = mean = 0.0
    for tokens, groups in zip(counts, placement, strict=True):
        loads = [sum(tokens[expert] for expert in group) for group in groups]
        longest += max(loads)
        mean += sum(loads) / len(loads)
    return longest / mean if mean else 1.0
