"""Tool calls as Hermes and Qwen write them.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from deploy.http.parsers.tool_parser import ToolParser, Waits


class HermesParser(ToolParser):
    """One call for each marker."""

    marker = "<tool_call>"

    def _read_calls(self, at: int) -> Waits:
        at = yield from self._skip_space(at)
        at = yield from self._read_call(at)
        if at < 0:
            return
        at = yield from self._skip_space(at)
        end = yield from self._after(at, "</tool_call>")
        self._text = self._text[max(end, 0) :]
