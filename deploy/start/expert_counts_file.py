"""Reads how many tokens the experts of a model got, from a saved answer of /metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

from engine.errors import ConfigError

_SAMPLE = re.compile(r"^manta_engine_expert_tokens_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_expert_counts(path: str) -> dict[int, list[int]]:
    """By decoder layer, of each expert: the sums over all replicas in a text of /metrics, or what
    `LLM.expert_tokens()` gave, as JSON. Raises `ConfigError` if the file has neither."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from error
    counts = _of_json(text) if text.lstrip().startswith("{") else _of_metrics(text)
    if not counts:
        raise ConfigError(
            f"{path} has no counts of experts; save /metrics of a server that runs with "
            "enable_expert_metrics: true."
        )
    return counts


def _of_json(text: str) -> dict[int, list[int]]:
    try:
        return {int(layer): [int(n) for n in tokens] for layer, tokens in json.loads(text).items()}
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the counts aren't lists of numbers by layer: {error}.") from error


def _of_metrics(text: str) -> dict[int, list[int]]:
    sums: dict[int, dict[int, int]] = {}
    models = set()
    for labels, value in _SAMPLE.findall(text):
        found = dict(_LABEL.findall(labels))
        models.add(found.get("model_name", ""))
        experts = sums.setdefault(int(found["layer"]), {})
        expert = int(found["expert"])
        experts[expert] = experts.get(expert, 0) + int(float(value))
    if len(models) > 1:
        raise ConfigError(
            f"the counts are those of several models ({', '.join(sorted(models))}); keep the lines "
            "of one."
        )
    return {
        layer: [experts.get(number, 0) for number in range(max(experts) + 1)]
        for layer, experts in sorted(sums.items())
    }
