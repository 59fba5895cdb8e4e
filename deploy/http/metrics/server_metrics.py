"""`ServerMetrics`: what one ingress measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter

from deploy.http.engine_client import EngineClient, PlainFamily
from deploy.http.metrics.exposition import Family, joined, label_text, scalar
from deploy.http.metrics.request_metrics import RequestMetrics, plain_families
from deploy.http.metrics.scrape import Scrape
from deploy.http.served_models import ServedModels

MetricsNames = Literal["manta", "vllm"]
REFUSALS = ("unauthorized", "forbidden", "misdirected")
"""Why requests are refused before they reach an endpoint."""


class ServerMetrics:
    """All metrics of a process. Use from one event loop."""

    def __init__(self, names: MetricsNames = "manta") -> None:
        """`names` "vllm": vLLM's names stand beside Manta's."""
        self._names = names
        self._endpoints: list[str] = []
        self.unnamed = RequestMetrics()
        """Of requests whose model isn't known; where only one is served, of all."""
        self._by_model = {"": self.unnamed}
        self._registry = CollectorRegistry()
        self._refusals = Counter(
            "manta_refusals",
            "Requests refused before they reached an endpoint.",
            ["reason"],
            registry=self._registry,
        )
        for reason in REFUSALS:
            self._refusals.labels(reason)
        self._read_on = Counter(
            "manta_requests_read_on",
            "Requests answered once more, for a client that came back.",
            ["endpoint"],
            registry=self._registry,
        )
        self._taken_up = Counter(
            "manta_responses_taken_up",
            "Responses begun again, because the process that made them was lost or couldn't.",
            registry=self._registry,
        )
        self._lines = Counter(
            "manta_batch_lines",
            "Lines of batches whose answers are kept, by how they ended.",
            ["result"],
            registry=self._registry,
        )
        for result in ("completed", "failed"):
            self._lines.labels(result)
        self._store_failures = Counter(
            "manta_request_store_failures",
            "Times that the store of requests, or that of files, couldn't be used.",
            registry=self._registry,
        )
        self._scrape = Scrape()

    def of(self, model: str) -> RequestMetrics:
        """Of the requests for one of several models, by `ServedModels.label`."""
        found = self._by_model.get(model)
        if found is None:
            found = self._by_model[model] = RequestMetrics()
            for endpoint in self._endpoints:
                found.add_endpoint(endpoint)
        return found

    def add_endpoint(self, endpoint: str) -> None:
        """Export the endpoint's latencies from now on, also while there are none."""
        self._endpoints.append(endpoint)
        for requests in self._by_model.values():
            requests.add_endpoint(endpoint)

    def refused(self, reason: str) -> None:
        """A request was refused before it reached an endpoint. `reason`: a word of `REFUSALS`."""
        self._refusals.labels(reason).inc()

    def read_on(self, endpoint: str) -> None:
        """A request is answered once more."""
        self._read_on.labels(endpoint).inc()

    def taken_up(self) -> None:
        """A response is begun again."""
        self._taken_up.inc()

    def lines(self, completed: int, failed: int) -> None:
        """So many lines of a batch were answered, well and not."""
        self._lines.labels("completed").inc(completed)
        self._lines.labels("failed").inc(failed)

    def store_failed(self) -> None:
        """The store of requests couldn't be used."""
        self._store_failures.inc()

    @property
    def num_in_flight(self) -> float:
        """Requests received and not yet answered in full."""
        gauges = [requests.in_flight for requests in self._by_model.values()]
        return sum(s.value for gauge in gauges for m in gauge.collect() for s in m.samples)

    def report(self, models: ServedModels) -> list[PlainFamily]:
        """What this process measured, for the ingress that answers a scrape."""
        return [(f.name, f.kind, f.help, f.samples) for f in self._families(models)]

    async def render(self, models_provider: Callable[[], ServedModels]) -> bytes:
        """The metrics of all ingresses and engines in Prometheus' text format. Raises
        `EngineDeadError` while the server is still starting."""
        models = models_provider()
        return await self._scrape.text(models, self.report(models), with_vllm=self._has_vllm)

    @property
    def _has_vllm(self) -> bool:
        return self._names == "vllm"

    def _families(self, models: ServedModels) -> list[Family]:
        found: list[Family] = []
        for client in models:
            labels = _labels(client.model_info.name, client)
            requests = self.of(models.label(client))
            found += requests.families(labels, with_vllm=self._has_vllm, has_finished=True)
            found.append(_resumes(client.resumes, labels))
        unnamed = _labels("", models.first)
        if len(models) == 1:
            unnamed = labels
        else:
            found += self.unnamed.families(unnamed, with_vllm=False, has_finished=False)
        return found + plain_families(self._registry, unnamed)


def _labels(model: str, client: EngineClient) -> str:
    return label_text({"model_name": model, "ingress": client.ingress})


def _resumes(by_cause: Mapping[str, int], common: str) -> Family:
    return scalar(
        "manta_requests_resumed_total",
        "counter",
        "Times that a sequence went on elsewhere, by what it had lost.",
        [
            (joined(label_text({"cause": cause}), common), count)
            for cause, count in by_cause.items()
        ],
    )
