"""`EngineStats`: the statistics of the engines' schedulers, as families."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from deploy.http.metrics.exposition import Family, joined, label_text, scalar

ByLayer = dict[int, float] | dict[int, list[int]]
Statistics = Mapping[str, float | str | list[int] | ByLayer]
"""Of one replica, by name; `replica` is the replica's own name. A list has a number for each
position. A mapping has for each decoder layer a number, or a list with one for each expert."""


class EngineStats:
    """What the engines answered, or None if they didn't in time."""

    def __init__(self, replicas: Sequence[Statistics] | None) -> None:
        self._answered = replicas is not None
        self._replicas = [
            (_name(stats, index), stats) for index, stats in enumerate(replicas or ())
        ]

    def families(self, labels: str) -> list[Family]:
        """All statistics that are numbers, each with the label `replica`. `labels`: text of labels
        that every sample has."""
        samples: dict[str, list[tuple[str, float]]] = {}
        for name, stats in self._replicas:
            replica = joined(label_text({"replica": name}), labels)
            for key, value in stats.items():
                if key != "replica" and isinstance(value, int | float):
                    samples.setdefault(key, []).append((replica, value))
                elif isinstance(value, list):
                    samples.setdefault(key, []).extend(_by_position(replica, value))
                elif isinstance(value, dict) and value:
                    samples.setdefault(key, []).extend(_by_layer(replica, value))
        up = scalar(
            "manta_engine_stats_up",
            "gauge",
            "1 if the engines answered this scrape's question for statistics.",
            [(labels, float(self._answered))],
        )
        return [up, *(_family(key, values) for key, values in samples.items())]

    def by_replica(self, *keys: str) -> list[tuple[str, list[float]]]:
        """Replicas that have all of these statistics, which are numbers, with their values."""
        found = []
        for name, stats in self._replicas:
            values = [stats.get(key) for key in keys]
            if all(isinstance(value, int | float | str) for value in values):
                found.append((name, [float(value) for value in values]))  # type: ignore[arg-type]
        return found

    def by_position(self, key: str, labels_of: Callable[[str], str]) -> list[tuple[str, float]]:
        """Samples of a statistic that is a list: `labels_of` the replica, and the position."""
        found: list[tuple[str, float]] = []
        for name, stats in self._replicas:
            values = stats.get(key)
            if isinstance(values, list):
                found += _by_position(labels_of(name), values)
        return found


def _name(stats: Statistics, index: int) -> str:
    name = stats.get("replica", index)
    return f"{name:g}" if isinstance(name, float) else str(name)


def _by_position(labels: str, values: Sequence[int]) -> list[tuple[str, float]]:
    return [
        (joined(label_text({"position": str(at)}), labels), value)
        for at, value in enumerate(values)
    ]


def _by_layer(labels: str, values: ByLayer) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for layer, value in values.items():
        of_layer = {"layer": str(layer)}
        if isinstance(value, list):
            found += [
                (joined(label_text({**of_layer, "expert": str(expert)}), labels), tokens)
                for expert, tokens in enumerate(value)
            ]
        else:
            found.append((joined(label_text(of_layer), labels), value))
    return found


def _family(key: str, values: Sequence[tuple[str, float]]) -> Family:
    name = "manta_engine_" + re.sub(r"\W", "_", key, flags=re.ASCII)
    kind = "counter" if name.endswith("_total") else "gauge"
    return scalar(name, kind, f"Scheduler statistic {key}.", values)
