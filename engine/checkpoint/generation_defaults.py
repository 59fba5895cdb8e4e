"""Sampling defaults that a model brings along in its `generation_config.json`."""

from __future__ import annotations

import json
from pathlib import Path

from engine.errors import ConfigError, RequestError
from engine.protocol.sampling_params import MODEL_DEFAULTS, SamplingParams

FILE = "generation_config.json"


def read_generation_defaults(folder: Path, vocab_size: int) -> dict[str, float]:
    """Values of `MODEL_DEFAULTS` that the model's folder sets. Empty if it has no such file.

    `do_sample` is ignored, as in vLLM: a request without a temperature samples. Raises
    `ConfigError` if the file can't be read or a value is out of range.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    advice = "Correct the file, or set generation_config: none."
    try:
        content = json.loads(path.read_bytes())
        given = {name: content[name] for name in MODEL_DEFAULTS if content.get(name) is not None}
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} can't be read: {error}. {advice}") from error
    for name, value in given.items():
        is_int = type(value) is int
        if not is_int and (name == "top_k" or type(value) is not float):
            raise ConfigError(f"{path}: {name} must be a number, not {value!r}. {advice}")
    try:
        SamplingParams(**given).verify(vocab_size)
    except RequestError as error:
        raise ConfigError(f"{path}: {error.message}. {advice}") from error
    return given
