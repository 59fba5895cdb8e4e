"""`Histogram` and `HistogramFamily`: distributions that cost little to observe."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from deploy.http.metrics.exposition import Family, joined, label_text, sample

SECONDS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15),
    *(0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""Bounds of latencies: fine where inter-token times lie, coarse up to long generations."""
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
"""Bounds of numbers of tokens, up to 500,000."""
COPIES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class Histogram:
    """One series. For one event loop: no locks, so observing costs a bisection.

    prometheus_client's own took 2.6 µs an observation, which is too much for every token.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket; the last has what is above all bounds."""
        self.total = 0.0
        """Sum of what was observed."""

    def observe(self, value: float, times: int = 1) -> None:
        """Count `times` events of this value each."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: Histogram) -> None:
        """Count what another histogram with the same bounds counted."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


class HistogramFamily:
    """A histogram by endpoint, or one series without labels (endpoint "")."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float] = SECONDS) -> None:
        self.name = name
        self.help = help_text
        self._bounds = bounds
        self._series: dict[str, Histogram] = {}

    def series(self, endpoint: str = "") -> Histogram:
        """Is exported from now on, also while it is empty."""
        found = self._series.get(endpoint)
        if found is None:
            found = self._series[endpoint] = Histogram(self._bounds)
        return found

    def sum(self) -> Histogram:
        """Of all endpoints."""
        total = Histogram(self._bounds)
        for series in self._series.values():
            total.add(series)
        return total

    def family(self, labels: str) -> Family:
        """In text. `labels`: text of labels that every sample has."""
        lines = [
            line
            for endpoint, series in self._series.items()
            for line in histogram_lines(
                self.name,
                joined(label_text({"endpoint": endpoint}) if endpoint else "", labels),
                series,
            )
        ]
        return Family(self.name, "histogram", self.help, "".join(lines))


def histogram_lines(name: str, labels: str, histogram: Histogram) -> list[str]:
    """The samples of one series. `labels` is a label text."""
    cumulated = list(accumulate(histogram.counts))
    bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
    lines = [
        sample(f"{name}_bucket", joined(labels, f'le="{bound}"'), count)
        for bound, count in zip(bounds, cumulated, strict=True)
    ]
    lines.append(sample(f"{name}_count", labels, cumulated[-1]))
    lines.append(sample(f"{name}_sum", labels, histogram.total))
    return lines
