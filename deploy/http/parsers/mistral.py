"""Tool calls as Mistral's models write them: a list, or since 2025 one call behind each token.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

from collections.abc import Collection

from deploy.http.parsers.tool_parser import ToolParser, Waits

_CALL_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"


class MistralParser(ToolParser):
    """Knows both forms."""

    marker = "[TOOL_CALLS]"

    def _read_calls(self, at: int) -> Waits:
        at = yield from self._skip_space(at)
        if self._text.startswith(("[", "{"), at):
            yield from super()._read_calls(at)
            return
        before = self._num_calls
        yield from self._read_named(at)
        while self._num_calls > before:
            # Further calls may lack the token, but not the name of a tool.
            before = self._num_calls
            at = yield from self._skip_space(0)
            yield from self._read_named(at, self._tools)

    def _read_named(self, at: int, names: Collection[str] | None = None) -> Waits:
        """A call of a function, of one of `names` if they are given, by its name at `at`."""
        end = yield from self._word(at)
        if end < 0 or (names is not None and self._text[at:end] not in names):
            return
        name, at = self._text[at:end], end
        behind = yield from self._after(at, _CALL_ID)
        if behind >= 0:
            behind = yield from self._word(behind)
            at = max(behind, at)
        behind = yield from self._after(at, _ARGUMENTS)
        at = yield from self._skip_space(max(behind, at))
        is_cut = behind >= 0 and at == len(self._text)
        if is_cut or self._text.startswith(("{", "[", '"') if behind >= 0 else "{", at):
            at = yield from self._read_arguments(name, at)
            yield from self._drop_left_overs(at)
