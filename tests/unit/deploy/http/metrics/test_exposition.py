"""Text of metrics: what one writes, Prometheus' own parser reads."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from deploy.http.metrics.exposition import exposition, joined, label_text, scalar
from deploy.http.metrics.histogram import SECONDS, Histogram, HistogramFamily

VALUES = st.floats() | st.integers(-(2**53), 2**53)
NAMES = st.text(min_size=1, max_size=20)
FAMILIES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b_total", "c_seconds"]),
        st.text(max_size=20).map(lambda text: " ".join(text.split())),
        st.dictionaries(NAMES, VALUES, max_size=4),
    ),
    max_size=8,
)


@given(FAMILIES)
def test_every_sample_is_read_again(
    given_families: list[tuple[str, str, dict[str, float]]],
) -> None:
    families, expected = [], []
    for number, (name, help_text, values) in enumerate(given_families):
        common = label_text({"ingress": str(number)})
        pairs = [(joined(label_text({"key": key}), common), v) for key, v in values.items()]
        families.append(scalar(name, "gauge", help_text, pairs))
        expected += [(name, key, str(number), float(value)) for key, value in values.items()]
    text = exposition(families).decode()
    found = [
        (sample.name, sample.labels["key"], sample.labels["ingress"], sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]

    def order(entry: tuple[str, str, str, float]) -> tuple[str, str, str, str]:
        return (*entry[:3], repr(entry[3]))

    assert sorted(map(order, found)) == sorted(map(order, expected))
    heads = [line for line in text.split("\n") if line.startswith("# TYPE ")]
    assert len(heads) == len(set(heads)) == len({name for name, _, _ in given_families})


@given(
    st.lists(
        st.tuples(st.sampled_from(["x", "y"]), st.floats(0, 1000), st.integers(1, 9)), max_size=50
    )
)
def test_a_histogram_counts_every_event_once(events: list[tuple[str, float, int]]) -> None:
    family = HistogramFamily("h_seconds", "Some time.")
    for endpoint, value, times in events:
        family.series(endpoint).observe(value, times)
    text = exposition([family.family(label_text({"ingress": "i"}))]).decode()
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    for endpoint in {endpoint for endpoint, _, _ in events}:
        mine = [(value, times) for name, value, times in events if name == endpoint]
        of = [s for s in samples if s.labels["endpoint"] == endpoint]
        buckets = {float(s.labels["le"]): s.value for s in of if s.name == "h_seconds_bucket"}
        assert sorted(buckets) == [*SECONDS, math.inf]
        for bound, count in buckets.items():
            assert count == sum(times for value, times in mine if value <= bound)
        (count,) = (s.value for s in of if s.name == "h_seconds_count")
        assert count == buckets[math.inf]
        (total,) = (s.value for s in of if s.name == "h_seconds_sum")
        assert math.isclose(total, sum(value * times for value, times in mine), abs_tol=1e-9)
    both = Histogram(SECONDS)
    for _, value, times in events:
        both.observe(value, times)
    assert family.sum().counts == both.counts
