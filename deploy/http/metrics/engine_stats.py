"""`EngineStats`: the statistics of the engines' schedulers, as families."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from deploy.http.metrics.exposition import Family, joined, label_text, scalar

Statistics = Mapping[str, float | str]
"""Of one replica, by name; `replica` is the replica's own name."""


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
        up = scalar(
            "manta_engine_stats_up",
            "gauge",
            "1 if the engines answered this scrape's question for statistics.",
            [(labels, float(self._answered))],
        )
        return [up, *(_family(key, values) for key, values in samples.items())]

    def by_replica(self, *keys: str) -> list[tuple[str, list[float]]]:
        """Replicas that have all of these statistics, with their values."""
        return [
            (name, [float(stats[key]) for key in keys])
            for name, stats in self._replicas
            if all(key in stats for key in keys)
        ]


def _name(stats: Statistics, index: int) -> str:
    name = stats.get("replica", index)
    return f"{name:g}" if isinstance(name, float) else str(name)


def _family(key: str, values: Sequence[tuple[str, float]]) -> Family:
    name = "manta_engine_" + re.sub(r"\W", "_", key, flags=re.ASCII)
    kind = "counter" if name.endswith("_total") else "gauge"
    return scalar(name, kind, f"Scheduler statistic {key}.", values)
