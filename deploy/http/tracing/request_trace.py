"""`RequestTrace`: when the parts of one request began and ended, and the spans of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from deploy.http.metrics import RequestTracker
from engine.protocol.tokenizer_messages import TextDelta


@dataclass
class _Sequence:
    """Times by `time.perf_counter`. `last_at`: None if it hasn't ended."""

    first_at: float
    queue_s: float
    num_prompt: int
    num_cached: int
    is_embedding: bool
    last_at: float | None = None
    finish_reason: str = ""
    num_output: int = 0


@dataclass
class RequestTrace:
    """Notes one request from now on. The spans are made when it is over."""

    status: int | None = None
    """Of the reply; None until it begins."""
    model: str = ""
    """Set once the request is known to name it."""
    num_prompt: int | None = None
    """Tokens of all prompts, once they are known."""
    _num_output: int = 0
    _given_at: float | None = None
    _start: float = field(default_factory=time.perf_counter)
    _start_ns: int = field(default_factory=time.time_ns)
    _sequences: dict[int, _Sequence] = field(default_factory=dict)

    def begin(self, model: str, num_prompt: int) -> None:
        """The request has been checked; its sequences are about to run."""
        self.model, self.num_prompt = model, num_prompt

    def delta(self, index: int, delta: TextDelta) -> None:
        """Note progress of a sequence. Only its first and its last delta matter."""
        sequence = self._sequences.get(index)
        if sequence is None:
            if delta.num_output == 0 and delta.finish_reason in ("abort", "error"):
                return  # nothing came before: nobody knows how far it got
            self._sequences[index] = sequence = _Sequence(
                time.perf_counter(),
                delta.queue_s,
                delta.num_prompt,
                delta.num_cached,
                delta.embedding is not None,
            )
        if delta.finish_reason is not None:
            sequence.last_at = time.perf_counter()
            sequence.finish_reason, sequence.num_output = delta.finish_reason, delta.num_output

    def end(self, status: int, tracker: RequestTracker) -> None:
        """The answer is complete, or nobody is left to read it."""
        self.status = status
        self._num_output = tracker.num_output
        if tracker.work is not None:
            self._given_at = tracker.work.given_at

    def export(
        self,
        tracer: Tracer,
        parent: Context,
        method: str,
        route: str,
        attributes: dict[str, AttributeValue],
    ) -> None:
        """Make the spans and give them to the exporter. The request ends now. `route`: the path as
        the application knows it; "" if it has none."""
        now = time.perf_counter()
        status = 499 if self.status is None else self.status
        root = tracer.start_span(
            f"{method} {route}".rstrip(),
            parent,
            SpanKind.SERVER,
            {
                "http.request.method": method,
                "http.response.status_code": status,
                **({"http.route": route} if route else {}),
                **self._usage(),
                **attributes,
            },
            start_time=self._ns(self._start),
        )
        if status >= 499:
            root.set_attribute("error.type", str(status))
        if status >= 500:
            root.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(root, parent)
        for index, sequence in sorted(self._sequences.items()):
            self._export_sequence(tracer, inside, index, sequence, now)
        root.end(self._ns(now))

    def _usage(self) -> dict[str, AttributeValue]:
        if self.num_prompt is None:
            return {}
        return {
            "gen_ai.request.model": self.model,
            "gen_ai.usage.input_tokens": self.num_prompt,
            "gen_ai.usage.output_tokens": self._num_output,
        }

    def _export_sequence(
        self, tracer: Tracer, inside: Context, index: int, sequence: _Sequence, now: float
    ) -> None:
        def add(name: str, start: float, end: float, extra: dict[str, AttributeValue]) -> None:
            span = tracer.start_span(
                name,
                inside,
                attributes={"manta.sequence": index, **extra},
                start_time=self._ns(start),
            )
            span.end(self._ns(end))

        given_at = self._start if self._given_at is None else self._given_at
        # Another process measured the time in the queue.
        admitted_at = min(given_at + sequence.queue_s, sequence.first_at)
        add("queue", given_at, admitted_at, {})
        prefill: dict[str, AttributeValue] = {
            "gen_ai.usage.input_tokens": sequence.num_prompt,
            "manta.cached_tokens": sequence.num_cached,
        }
        add("prefill", admitted_at, sequence.first_at, prefill)
        if sequence.is_embedding:
            return
        decode: dict[str, AttributeValue] = {}
        if sequence.last_at is not None:
            decode["gen_ai.usage.output_tokens"] = sequence.num_output
            decode["gen_ai.response.finish_reasons"] = [sequence.finish_reason]
        add("decode", sequence.first_at, sequence.last_at or now, decode)

    def _ns(self, at: float) -> int:
        return self._start_ns + round((at - self._start) * 1e9)
