"""Tool calls as Hermes and Qwen write them.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from deploy.http.parsers.tool_parser import ToolParser


class HermesParser(ToolParser):
    """One call for each marker, or several."""

    marker = "<tool_call>"
    closing = "</tool_call>"
