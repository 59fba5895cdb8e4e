"""The words of the configuration for tool calls and reasoning."""

from __future__ import annotations

import pytest

from deploy.http.parsers.detection import REASONING_FORMATS, check_parsers, model_reasons
from deploy.http.parsers.tool_format import TOOL_FORMATS
from engine.errors import ConfigError


def test_every_word_is_taken() -> None:
    for tools in ("auto", "none", *TOOL_FORMATS):
        for reasoning in ("auto", "none", *REASONING_FORMATS):
            check_parsers(tools, reasoning)


def test_other_words_are_refused() -> None:
    for words in (("hermes2", "auto"), ("auto", "qwen")):
        with pytest.raises(ConfigError, match="is unknown; choose one of"):
            check_parsers(*words)


def test_which_models_reason() -> None:
    thinks, plain = {"default": "<think></think>"}, {"default": "a"}
    assert model_reasons("auto", thinks) and model_reasons("qwen3", plain)
    assert not model_reasons("auto", plain) and not model_reasons("none", thinks)
