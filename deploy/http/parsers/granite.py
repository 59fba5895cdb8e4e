"""Tool calls as Granite 3 writes them: a list behind a token, or since 3.1 behind its text.

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
"""

from __future__ import annotations

from deploy.http.parsers.tool_parser import ToolParser


class GraniteParser(ToolParser):
    """Knows both markers. Granite 4 writes as Hermes does."""

    marker = "<|tool_call|>"
    other_markers = ("<tool_call>",)
