"""Words of the configuration and what they stand for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.registry import (
    ATTENTION_BACKENDS,
    EVICTION_POLICIES,
    MODELS,
    SAMPLING_BACKENDS,
    SCHEDULE_POLICIES,
    Registry,
)

ROOT = Path(__file__).resolve().parents[2]


def test_words_keep_their_order_and_unknown_ones_are_refused() -> None:
    registry: Registry[type] = Registry("shape", {"round": set, "flat": list})
    assert list(registry) == ["round", "flat"] and "flat" in registry and "bent" not in registry
    assert registry["flat"] is list
    with pytest.raises(ConfigError, match="shape 'bent' is unknown; choose one of round, flat"):
        registry["bent"]
    other: Registry[type] = Registry("shape", {"round": set}, ValueError)
    with pytest.raises(ValueError, match="choose one of round"):
        other["bent"]


@pytest.mark.parametrize("registry", [ATTENTION_BACKENDS, SAMPLING_BACKENDS, MODELS])
def test_everything_that_is_imported_by_name_is_there(registry: Registry[object]) -> None:
    assert all(callable(registry[word]) for word in registry)


def test_the_configuration_takes_the_words_of_the_registries() -> None:
    fields = EngineConfig.model_fields
    for key, words in {
        "schedule_policy": list(SCHEDULE_POLICIES),
        "eviction_policy": list(EVICTION_POLICIES),
        "attention_backend": ["auto", *ATTENTION_BACKENDS],
        "sampling_backend": ["auto", *SAMPLING_BACKENDS],
    }.items():
        assert list(get_args(fields[key].annotation)) == words
        assert fields[key].default in words


def test_checking_a_configuration_imports_no_torch() -> None:
    program = (
        "import sys; from engine.config import EngineConfig; EngineConfig().resolve()\n"
        "print(sorted({'torch', 'transformers', 'ray', 'zmq'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True
    )
    assert output.stdout.strip() == "[]"
