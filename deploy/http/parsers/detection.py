"""Which form of tool calls and reasoning a model has, by configuration or by its chat template."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.http.parsers.reasoning_parser import END, ReasoningParser
from deploy.http.parsers.tool_format import TOOL_FORMATS
from engine.registry import Registry

AUTO = "auto"
NONE = "none"
REASONING_FORMATS: Registry[type[ReasoningParser]] = Registry(
    "reasoning_parser", {"deepseek_r1": ReasoningParser, "qwen3": ReasoningParser}
)
"""vLLM's names. Both models mark reasoning alike; whether it begins in the prompt is seen there."""
_SIGNS = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3_json"}
_LLAMA = '"parameters": '
"""Llama 3.2's template shows the form, but not the token."""


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise `ConfigError` if one of the words is unknown."""
    if tool_call_parser not in (AUTO, NONE):
        _ = TOOL_FORMATS[tool_call_parser]
    if reasoning_parser not in (AUTO, NONE):
        _ = REASONING_FORMATS[reasoning_parser]


def tool_format_of(word: str, templates: Mapping[str, str]) -> str:
    """The word in `TOOL_FORMATS`; "" if the model calls no tools. `word` is the configured one,
    `templates` are the model's chat templates by name."""
    if word == NONE:
        return ""
    if word != AUTO:
        return word
    template = templates.get("tool_use") or templates.get("default") or ""
    if "tools" not in template:
        return ""
    signs = {**_SIGNS, _LLAMA: "llama3_json"}
    return next((name for sign, name in signs.items() if sign in template), "")


def model_reasons(word: str, templates: Mapping[str, str]) -> bool:
    """Whether outputs may begin with reasoning."""
    if word == AUTO:
        return any(END in template for template in templates.values())
    return word != NONE
