"""`RequestTracker`: measures one request from its arrival to its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deploy.http.metrics.histogram import Histogram
from deploy.http.metrics.request_metrics import RequestMetrics
from engine.protocol.tokenizer_messages import TextDelta


class Work(NamedTuple):
    """What the engines were given for a request."""

    given_at: float
    """By `time.perf_counter`."""
    n: int = 1
    """Sequences of each prompt."""
    max_tokens: Sequence[int] = ()
    """By prompt: what each of its sequences may generate. Empty if nothing is generated."""


@dataclass
class _Begin:
    """A sequence's first delta: when it came, and the output tokens and prefill it brought.
    `prefill_s`: None if it brought no token."""

    at: float
    num_output: int
    prefill_s: float | None


@dataclass
class RequestTracker:
    """Measures one request from now on. Its sequences are numbered as its choices."""

    metrics: RequestMetrics
    endpoint: str
    key: str = ""
    """Name of the API key that it came with; "": the server has no keys."""
    work: Work | None = None
    """To be set when its sequences are given to the engines."""
    _start: float = field(default_factory=time.perf_counter)
    _last: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By sequence: the time of its last delta, and its number of tokens until then."""
    _begins: dict[int, _Begin] = field(default_factory=dict)
    _num_prompt: int = 0
    _inter_token: Histogram = field(init=False)
    """The endpoint's series of latencies between tokens, looked up at the first delta."""

    def move(self, metrics: RequestMetrics) -> None:
        """Count the request there. To be called before it has sequences."""
        self.metrics.in_flight.labels(self.endpoint).dec()
        self.metrics = metrics
        metrics.in_flight.labels(self.endpoint).inc()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request came."""
        return time.perf_counter() - self._start

    @property
    def num_output(self) -> int:
        """Tokens that its sequences have generated so far."""
        return sum(tokens for _, tokens in self._last.values())

    def delta(self, index: int, delta: TextDelta) -> None:
        """Note progress of a sequence; called for every delta."""
        now = time.perf_counter()
        last = self._last.get(index)
        if last is None:
            self._begin(index, delta, now)
        elif (tokens := delta.num_output - last[1]) > 0:
            self._inter_token.observe((now - last[0]) / tokens, tokens)
        self._last[index] = (now, delta.num_output)
        if delta.finish_reason is not None:
            self._finish(index, delta, delta.finish_reason, now)

    def end(self, status: int) -> None:
        """The request is over; it may have succeeded, failed or been cancelled."""
        metrics, generated = self.metrics, self.num_output
        metrics.requests.labels(self.endpoint, str(status)).inc()
        metrics.generation_tokens.inc(generated)
        if self.key:
            metrics.key_requests.labels(self.key, str(status)).inc()
            metrics.key_prompt_tokens.labels(self.key).inc(self._num_prompt)
            metrics.key_generation_tokens.labels(self.key).inc(generated)
        if status != 200:
            return
        metrics.e2e_latency.series(self.endpoint).observe(self.elapsed_s)
        if self.work is not None:
            self._note_sizes(self.work)

    def _note_sizes(self, work: Work) -> None:
        metrics, n = self.metrics, work.n
        for prompt, max_tokens in enumerate(work.max_tokens):
            copies = range(prompt * n, (prompt + 1) * n)
            metrics.params_n.series().observe(n)
            metrics.params_max_tokens.series().observe(max_tokens)
            metrics.max_generation_tokens.series().observe(
                max(self._last[copy][1] for copy in copies)
            )

    def _begin(self, index: int, delta: TextDelta, now: float) -> None:
        metrics = self.metrics
        self._inter_token = metrics.inter_token_latency.series(self.endpoint)
        prefill_s = None
        if delta.num_output > 0:
            metrics.time_to_first_token.series(self.endpoint).observe(now - self._start)
            given_at = self._start if self.work is None else self.work.given_at
            prefill_s = max(0.0, now - given_at - delta.queue_s)
            metrics.prefill_time.series().observe(prefill_s)
        if delta.num_output > 0 or delta.embedding is not None:
            metrics.queue_time.series().observe(delta.queue_s)
        self._begins[index] = _Begin(now, delta.num_output, prefill_s)
        self._num_prompt += delta.num_prompt
        metrics.prompt_tokens.inc(delta.num_prompt)
        metrics.cached_prompt_tokens.inc(delta.num_cached)

    def _finish(self, index: int, delta: TextDelta, reason: str, now: float) -> None:
        metrics, begin = self.metrics, self._begins[index]
        metrics.sequences.labels(self.endpoint, reason).inc()
        if begin.prefill_s is None or reason == "error":
            return
        decode_s = now - begin.at
        metrics.decode_time.series().observe(decode_s)
        metrics.inference_time.series().observe(begin.prefill_s + decode_s)
        metrics.sequence_prompt_tokens.series().observe(delta.num_prompt)
        metrics.sequence_generation_tokens.series().observe(delta.num_output)
        if delta.num_output > begin.num_output:
            per_token_s = decode_s / (delta.num_output - begin.num_output)
            metrics.time_per_output_token.series().observe(per_token_s)
