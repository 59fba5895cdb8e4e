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

    def _read_calls(self, at: int) -> Waits:
        before = self._num_calls
        at = yield from self._skip_space(at)
        opened = yield from self._after(at, "[")
        yield from self._read_several(max(opened, at))
        if self._num_calls == before:
            return
        at = yield from self._skip_space(0)
        end = yield from self._after(at, "</tool_call>")
        yield from self._drop_left_overs(max(end, 0))
