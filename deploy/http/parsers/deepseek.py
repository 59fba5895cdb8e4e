"""Tool calls as DeepSeek V3 and V3.1 write them, with the arguments as JSON.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from deploy.http.parsers.tool_parser import ToolParser, Waits

CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE, FENCED = "```", "```json"
KIND = "function"
"""Stands in V3's form where V3.1 has the name."""


class DeepSeekParser(ToolParser):
    """Knows both forms."""

    marker = "<｜tool▁calls▁begin｜>"
    closing = "<｜tool▁calls▁end｜>"

    def _read_calls(self, at: int) -> Waits:
        while True:
            at = yield from self._skip_space(at)
            at = yield from self._after(at, CALL)
            if at < 0:
                return
            before = self._num_calls
            yield from self._read_named(at)
            if self._num_calls == before:
                return
            yield from self._drop_left_overs(0)
            at = 0

    def _read_named(self, at: int) -> Waits:
        """A call whose name stands at `at`, and what closes it."""
        end = yield from self._word(at)
        behind = -1 if end < 0 else (yield from self._after(end, SEPARATOR))
        if behind < 0:
            return
        name = self._text[at:end]
        at = yield from self._skip_space(behind)
        if name == KIND and not self._text.startswith("{", at):
            end = yield from self._word(at)
            if end < 0 or end == len(self._text):
                return
            name = self._text[at:end]
            at = yield from self._skip_space(end)
            at = yield from self._behind(at, FENCED)
            if at < 0:
                return
            at = yield from self._skip_space(at)
        if at < len(self._text) and self._text[at] not in '{["':
            return
        yield from self._read_arguments(name, at)
        for word in (FENCE, CALL_END):
            at = yield from self._skip_space(0)
            behind = yield from self._behind(at, word)
            if behind >= 0:
                self._drop(behind)
