"""The words of the configuration for tool calls and reasoning."""

from __future__ import annotations

import pytest

from deploy.http.parsers.detection import check_parsers, reasoning_format_of, tool_format_of
from deploy.http.parsers.reasoning_format import REASONING_FORMATS
from deploy.http.parsers.tool_format import TOOL_FORMATS
from engine.errors import ConfigError
from tests.unit.deploy.http.parsers.model_templates import MODEL_TEMPLATES


def test_every_word_is_taken() -> None:
    for tools in ("auto", "none", *TOOL_FORMATS):
        check_parsers(tools, "auto")
    for reasoning in ("auto", "none", *REASONING_FORMATS):
        check_parsers("auto", reasoning)


@pytest.mark.parametrize(
    ("tools", "reasoning", "found"),
    [
        ("gpt-oss", "gpt-oss", ("gpt_oss", "gpt_oss")),
        ("openai", "openai_gptoss", ("openai", "openai_gptoss")),
        ("openai", "auto", ("openai", "gpt_oss")),
        ("none", "gpt-oss", ("", "gpt_oss")),
        ("qwen3_coder", "deepseek-r1", ("qwen3_coder", "deepseek_r1")),
        ("minimax-m2", "none", ("minimax_m2", "")),
    ],
)
def test_words_of_vllm_and_sglang(tools: str, reasoning: str, found: tuple[str, str]) -> None:
    check_parsers(tools, reasoning)
    tool_format = tool_format_of(tools, {})
    assert (tool_format, reasoning_format_of(reasoning, tool_format, {})) == found


def test_other_words_are_refused() -> None:
    for words in (("hermes2", "auto"), ("auto", "qwen")):
        with pytest.raises(ConfigError, match="is unknown; choose one of"):
            check_parsers(*words)


def test_channels_need_both_parsers() -> None:
    for words in (("gpt_oss", "none"), ("gpt_oss", "qwen3"), ("hermes", "gpt-oss")):
        with pytest.raises(ConfigError, match="reads thoughts and calls together"):
            check_parsers(*words)


def test_channels_that_only_a_template_shows() -> None:
    template, tools, _ = MODEL_TEMPLATES["gpt-oss"]
    with pytest.raises(ConfigError, match="reads thoughts and calls together"):
        reasoning_format_of("none", tools, {"default": template})
    both = {"default": f"{template} <tool_call> </think>"}
    assert tool_format_of("auto", both) == "hermes"
    assert reasoning_format_of("auto", "hermes", both) == "deepseek_r1"
    assert reasoning_format_of("auto", "", {"default": template}) == "openai_gptoss"


def test_which_models_reason() -> None:
    thinks, plain = {"default": "<think></think>"}, {"default": "a"}
    assert reasoning_format_of("auto", "", thinks) and reasoning_format_of("qwen3", "", plain)
    assert not reasoning_format_of("auto", "", plain)
    assert not reasoning_format_of("none", "", thinks)


@pytest.mark.parametrize("name", MODEL_TEMPLATES)
def test_what_a_template_shows(name: str) -> None:
    template, tools, reasoning = MODEL_TEMPLATES[name]
    templates = {"default": template}
    assert tool_format_of("auto", templates) == tools
    assert reasoning_format_of("auto", tools, templates) == reasoning


def test_a_template_that_takes_no_tools_has_no_form() -> None:
    assert tool_format_of("auto", {"default": "<tool_call> {{ messages }}"}) == ""
    assert tool_format_of("auto", {"default": "a", "tool_use": "tools <tool_call>"}) == "hermes"
