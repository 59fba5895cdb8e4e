"""Tool calls as Llama 3 writes them: the whole output is calls, or what follows a token.

{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": ...}
<|python_tag|>{"name": ...}
"""

from __future__ import annotations

from deploy.http.parsers.tool_parser import ToolParser, Waits


class Llama3Parser(ToolParser):
    """A JSON object may be an answer, too: it is a call only if it names one of the tools."""

    marker = "<|python_tag|>"

    def _parse(self) -> Waits:
        yield
        at = yield from self._skip_space(0)
        if self._text.startswith(("{", "["), at):
            yield from self._read_calls(at)
        yield from super()._parse()

    def _takes(self, name: str) -> bool:
        return name in self._tools
