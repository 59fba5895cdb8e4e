"""Reads how many tokens the experts of a model got, from a saved answer of /metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

from engine.errors import ConfigError

_SAMPLE = re.compile(r"^manta_engine_expert_tokens_total\{(.*)\} (\S+)(?: \d+)?\r?$", re.MULTILINE)
MAX_EXPERTS = 1 << 16
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_expert_counts(path: str) -> dict[int, list[int]]:
    """By decoder layer, of each expert: the sums over all replicas in a text of /metrics, or what
    `LLM.expert_tokens()` gave, as JSON. Raises `ConfigError` if the file has neither."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from error
    try:
        counts = _of_json(text) if text.lstrip().startswith("{") else _of_metrics(text)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"the counts in {path} aren't numbers by layer and expert: {error}."
        ) from error
    if not counts:
        raise ConfigError(
            f"{path} has no counts of experts; save /metrics of a server that runs with "
            "enable_expert_metrics: true."
        )
    return counts


def _of_json(text: str) -> dict[int, list[int]]:
    counts = {}
    for layer, tokens in json.loads(text).items():
        if not isinstance(tokens, list) or not tokens:
            raise ValueError(f"layer {layer} has no list of them")
        counts[int(layer)] = [_count(n) for n in tokens]
    return counts


def _count(value: str | float) -> int:
    count = int(float(value))
    if count < 0:
        raise ValueError(f"{value} is negative")
    return count


def _of_metrics(text: str) -> dict[int, list[int]]:
    sums: dict[int, dict[int, int]] = {}
    models = set()
    for labels, value in _SAMPLE.findall(text):
        found = dict(_LABEL.findall(labels))
        models.add(found.get("model_name", ""))
        experts = sums.setdefault(int(found["layer"]), {})
        expert = int(found["expert"])
        if not 0 <= expert < MAX_EXPERTS:
            raise ValueError(f"there is no expert {expert}")
        experts[expert] = experts.get(expert, 0) + _count(value)
    if len(models) > 1:
        raise ConfigError(
            f"the counts are those of several models ({', '.join(sorted(models))}); keep the lines "
            "of one."
        )
    return {
        layer: [experts.get(number, 0) for number in range(max(experts) + 1)]
        for layer, experts in sorted(sums.items())
    }
