"""`RequestMetrics`: what one ingress measures of the requests for one model."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import Metric

from deploy.http.metrics.exposition import Family, joined, label_text, sample
from deploy.http.metrics.histogram import COPIES, TOKENS, HistogramFamily
from deploy.http.metrics.vllm_names import ingress_families


class RequestMetrics:
    """Use from one event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter(
            "manta_requests",
            "Requests by final HTTP status; 499: the client left.",
            "endpoint",
            "status",
        )
        self.sequences = self._counter(
            "manta_sequences",
            "Finished sequences (choices) by finish_reason.",
            "endpoint",
            "finish_reason",
        )
        self.prompt_tokens = self._counter(
            "manta_prompt_tokens", "Prompt tokens of sequences that began."
        )
        self.cached_prompt_tokens = self._counter(
            "manta_cached_prompt_tokens",
            "Of manta_prompt_tokens those found in the prefix cache.",
        )
        self.generation_tokens = self._counter("manta_generation_tokens", "Generated tokens.")
        self.in_flight = Gauge(
            "manta_requests_in_flight",
            "Requests received and not yet answered in full.",
            ["endpoint"],
            registry=self._registry,
        )
        self.key_requests = self._counter(
            "manta_key_requests", "Requests of an API key by final HTTP status.", "key", "status"
        )
        self.key_prompt_tokens = self._counter(
            "manta_key_prompt_tokens", "Prompt tokens of an API key's sequences.", "key"
        )
        self.key_generation_tokens = self._counter(
            "manta_key_generation_tokens", "Generated tokens of an API key's sequences.", "key"
        )
        self._add_histograms()

    def _add_histograms(self) -> None:
        self._histograms: list[HistogramFamily] = []
        self.time_to_first_token = self._histogram(
            "manta_time_to_first_token_seconds",
            "From a request's arrival to a sequence's first delta.",
        )
        self.inter_token_latency = self._histogram(
            "manta_inter_token_latency_seconds", "Between tokens of a sequence."
        )
        self.e2e_latency = self._histogram(
            "manta_e2e_request_latency_seconds",
            "From a request's arrival to the end of its answer, if the status is 200.",
        )
        self._by_endpoint = tuple(self._histograms)
        self.queue_time = self._histogram(
            "manta_queue_time_seconds",
            "Of a sequence in the scheduler's queue, until it was first admitted.",
        )
        self.prefill_time = self._histogram(
            "manta_prefill_time_seconds", "From a sequence's first admission to its first delta."
        )
        self.decode_time = self._histogram(
            "manta_decode_time_seconds", "From a sequence's first delta to its last."
        )
        self.inference_time = self._histogram(
            "manta_inference_time_seconds", "Prefill time and decode time of a sequence."
        )
        self.time_per_output_token = self._histogram(
            "manta_time_per_output_token_seconds",
            "Decode time of a sequence, by its output tokens after the first delta.",
        )
        self.sequence_prompt_tokens = self._histogram(
            "manta_sequence_prompt_tokens", "Prompt tokens of finished sequences.", TOKENS
        )
        self.sequence_generation_tokens = self._histogram(
            "manta_sequence_generation_tokens", "Generated tokens of finished sequences.", TOKENS
        )
        self.max_generation_tokens = self._histogram(
            "manta_max_generation_tokens", "Tokens of a prompt's longest completion.", TOKENS
        )
        self.params_max_tokens = self._histogram(
            "manta_params_max_tokens", "Tokens that a prompt's completions may have.", TOKENS
        )
        self.params_n = self._histogram("manta_params_n", "Completions of a prompt.", COPIES)
        for histogram in self._histograms:
            if histogram not in self._by_endpoint:
                histogram.series()

    def add_endpoint(self, endpoint: str) -> None:
        """Export the endpoint's latencies from now on, also while there are none."""
        for histogram in self._by_endpoint:
            histogram.series(endpoint)

    def families(self, labels: str, *, with_vllm: bool, has_finished: bool) -> list[Family]:
        """All in text. `labels`: text of labels that every sample has; `has_finished`: whether any
        of these requests can have come as far as an engine."""
        found = plain_families(self._registry, labels)
        if has_finished:
            found += [histogram.family(labels) for histogram in self._histograms]
            if with_vllm:
                found += ingress_families(self._histograms, self._finished(), labels)
        return found

    def _finished(self) -> dict[str, float]:
        """Sequences of all endpoints by finish reason."""
        counts: dict[str, float] = {}
        for metric in self.sequences.collect():
            for entry in metric.samples:
                if entry.name.endswith("_total"):
                    reason = entry.labels["finish_reason"]
                    counts[reason] = counts.get(reason, 0.0) + entry.value
        return counts

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self._registry)

    def _histogram(
        self, name: str, help_text: str, bounds: tuple[float, ...] = ()
    ) -> HistogramFamily:
        made = HistogramFamily(name, help_text, *([bounds] if bounds else []))
        self._histograms.append(made)
        return made


def plain_families(registry: CollectorRegistry, labels: str) -> list[Family]:
    """The counters and gauges of prometheus_client in text. `labels`: text of labels that every
    sample has."""
    return [_family(metric, labels) for metric in registry.collect()]


def _family(metric: Metric, common: str) -> Family:
    """A counter or gauge of prometheus_client in text, without the times of its creation."""
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    lines = [
        sample(entry.name, joined(label_text(entry.labels), common), entry.value)
        for entry in metric.samples
        if entry.name == name
    ]
    return Family(name, metric.type, metric.documentation, "".join(lines))
