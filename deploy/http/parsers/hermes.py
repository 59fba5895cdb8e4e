"""Tool calls as Hermes and Qwen write them.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from deploy.http.parsers.tool_parser import ToolParser, Waits


class HermesParser(ToolParser):
    """One call for each marker, or several."""

    marker = "<tool_call>"
    closing = "</tool_call>"

    def _read_calls(self, at: int) -> Waits:
        yield from self._read_several(at)
