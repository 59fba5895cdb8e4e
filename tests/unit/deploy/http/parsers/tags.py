"""Calls between tags as the models' templates show them."""

from __future__ import annotations

from deploy.http.parsers.tool_parser import ToolParser
from deploy.http.parsers.xml_calls import Glm45Parser, MiniMaxM2Parser, Qwen3CoderParser


def tagged(kind: type[ToolParser], name: str, values: dict[str, str]) -> str:
    """A call as the model's template shows it, without what stands around groups of calls."""
    if kind is Qwen3CoderParser:
        inner = "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
        )
        return f"<function={name}>\n{inner}</function>"
    if kind is Glm45Parser:
        inner = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in values.items()
        )
        return f"{name}\n{inner}"
    inner = "".join(
        f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items()
    )
    return f'<invoke name="{name}">\n{inner}</invoke>'


def grouped(kind: type[ToolParser], calls: list[str]) -> str:
    """The calls with the marks around them."""
    if kind is MiniMaxM2Parser:
        return "<minimax:tool_call>\n" + "\n".join(calls) + "\n</minimax:tool_call>"
    begin, end = ("", "") if kind is Glm45Parser else ("\n", "\n")
    return "\n".join(f"<tool_call>{begin}{each}{end}</tool_call>" for each in calls)


def written(kind: type[ToolParser], *calls: tuple[str, dict[str, str]]) -> str:
    return grouped(kind, [tagged(kind, name, values) for name, values in calls])
