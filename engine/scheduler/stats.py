"""Counters and gauges of one scheduler, for metrics, health and routing."""

from __future__ import annotations

import msgspec


class SchedulerStats(msgspec.Struct):
    """Gauges hold present values; `*_total` only grow. The unit is tokens unless the name has
    another."""

    num_running: int = 0
    num_waiting: int = 0
    num_flex_running: int = 0
    """Those of both that are flex requests."""
    num_flex_waiting: int = 0
    waiting_tokens: int = 0
    flex_waiting_tokens: int = 0
    """Those of flex requests."""
    kv_used_tokens: int = 0
    kv_flex_tokens: int = 0
    """Of these, what the end of all flex requests would give back."""
    kv_cached_tokens: int = 0
    kv_total_tokens: int = 0
    new_token_ratio: float = 0.0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    retractions_total: int = 0
    flex_retractions_total: int = 0
    """Flex requests that gave their room back, which aren't in `retractions_total`."""
    preemptions_total: int = 0
    requests_finished_total: int = 0
    kv_leaks_total: int = 0
    spec_decode_drafts_total: int = 0
    """Rows of steps that checked drafts."""
    spec_decode_draft_tokens_total: int = 0
    spec_decode_accepted_tokens_total: int = 0
    spec_decode_accepted_per_position_total: list[int] = msgspec.field(default_factory=list)
    """By place of the draft in its step."""
    adapters_held: int = 0
    """Adapters in the workers' host memory."""
    adapters_running: int = 0
    """Those that have a slot."""
    adapter_waiting_requests: int = 0
    """Requests that wait for a slot for their adapter, or until it is read."""
    adapter_loads_total: int = 0
    adapter_evictions_total: int = 0
    """Adapters that left the host's memory for others."""
    adapter_displacements_total: int = 0
    """Times that an adapter whose requests ran gave its slot to another."""
    expert_tokens_total: dict[int, list[int]] = msgspec.field(default_factory=dict)
    """By decoder layer, of each expert, if they are counted."""
    expert_imbalance: dict[int, float] = msgspec.field(default_factory=dict)
    """By decoder layer: tokens of the expert that got most, over the mean of all."""


def imbalance(tokens: list[int]) -> float:
    """The most of `tokens` by their mean; 1.0 if there are none."""
    total = sum(tokens)
    return max(tokens) * len(tokens) / total if total else 1.0
