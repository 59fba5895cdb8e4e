"""Which form of tool calls and reasoning a model has, by configuration or by its chat template."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.http.parsers.reasoning_format import REASONING_FORMATS
from deploy.http.parsers.tool_format import TOOL_FORMATS
from engine.errors import ConfigError

AUTO = "auto"
NONE = "none"


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise `ConfigError` if one of the words is unknown, or if they don't fit together."""
    tools, reasoning = _word(tool_call_parser), _word(reasoning_parser)
    wanted = "" if tools in (AUTO, NONE) else TOOL_FORMATS[tools].reasoning
    read = None if reasoning in (AUTO, NONE) else REASONING_FORMATS[reasoning].read
    if wanted and reasoning != AUTO and read is not REASONING_FORMATS[wanted].read:
        raise ConfigError(
            f"tool_call_parser {tool_call_parser!r} reads thoughts and calls together; set "
            f"reasoning_parser to auto or {wanted}, not {reasoning_parser!r}."
        )
    if read is not None and not wanted and tools not in (AUTO, NONE):
        raise ConfigError(
            f"reasoning_parser {reasoning_parser!r} reads thoughts and calls together; set "
            f"tool_call_parser to auto, not {tool_call_parser!r}."
        )


def tool_format_of(word: str, templates: Mapping[str, str]) -> str:
    """The word in `TOOL_FORMATS`; "" if the model calls no tools. `word` is the configured one,
    `templates` are the model's chat templates by name."""
    word = _word(word)
    if word == NONE:
        return ""
    if word != AUTO:
        return word
    template = templates.get("tool_use") or templates.get("default") or ""
    if "tools" not in template:
        return ""
    for name in TOOL_FORMATS:
        signs = TOOL_FORMATS[name].signs
        if any(all(sign in template for sign in together) for together in signs):
            return name
    return ""


def reasoning_format_of(word: str, tool_format: str, templates: Mapping[str, str]) -> str:
    """The word in `REASONING_FORMATS`; "" if outputs don't begin with reasoning. `tool_format` is
    what `tool_format_of` found. Raises `ConfigError` if `word` doesn't fit it."""
    word = _word(word)
    if word != AUTO:
        check_parsers(tool_format or NONE, word)
        return "" if word == NONE else word
    if tool_format and (wanted := TOOL_FORMATS[tool_format].reasoning):
        return wanted
    for name in REASONING_FORMATS:
        reasoning = REASONING_FORMATS[name]
        fits = reasoning.read is None or not tool_format
        if fits and any(reasoning.sign in template for template in templates.values()):
            return name
    return ""


def _word(word: str) -> str:
    """SGLang writes some names with a dash."""
    return word.replace("-", "_")
