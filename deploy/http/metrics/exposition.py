"""Families of metrics, which are prometheus_client's `Metric`s, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import Metric

Labels = Mapping[str, str]


def scalar(name: str, kind: str, help_text: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    """A counter or gauge. `name` is that of its samples: a counter's ends in `_total`."""
    metric = Metric(name.removesuffix("_total") if kind == "counter" else name, help_text, kind)
    for labels, value in values:
        metric.add_sample(name, dict(labels), value)
    return metric


def text_of(families: Sequence[Metric]) -> str:
    """What one process measured."""
    return generate_latest(_Measured(families)).decode()


def exposition(texts: Iterable[str]) -> bytes:
    """One text of several processes' texts. Families of one name are put together."""
    families: dict[str, list[str]] = {}
    for text in texts:
        found = text.removeprefix(_BEGIN).removesuffix("\n").split(f"\n{_BEGIN}")
        for family in filter(None, found):
            help_line, type_line, *samples = family.split("\n", 2)
            name = help_line.partition(" ")[0]
            families.setdefault(name, [_BEGIN + help_line, type_line]).extend(samples)
    return "\n".join([*chain.from_iterable(families.values()), ""]).encode()


_BEGIN = "# HELP "
"""Of a family. No sample's line begins with it, and values of labels have no line ends."""


class _Measured(NamedTuple):
    """As `generate_latest` takes it."""

    families: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.families
