"""Tool calls as Python: a list that is the whole output, or what stands between marks.

[get_weather(city="Paris"), get_time(zones=["CET"], is_exact=True)]

```tool_code
get_weather(city="Paris")
```

Objects in JSON are read as well, as `Llama3Parser` reads them.
"""

from __future__ import annotations

import ast
import json
from typing import Any

from deploy.http.parsers.argument_text import property_names
from deploy.http.parsers.llama3 import Llama3Parser
from deploy.http.parsers.tool_parser import FindsPlace, Waits

_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's names, which models mix in."""


class PythonicParser(Llama3Parser):
    """A call's arguments come in one piece, once they are whole. Other Python isn't a call."""

    marker = "```tool_code"
    closing = "```"

    def _read_calls(self, at: int) -> Waits:
        at = yield from self._skip_space(at)
        opened = yield from self._after(at, "[")
        inner = yield from self._skip_space(max(opened, at))
        if self._text.startswith(("{", "["), inner):
            yield from super()._read_calls(at)
            return
        while True:
            inner = yield from self._skip_space(inner)
            end = yield from self._read_python(inner)
            if end < 0:
                return
            yield from self._drop_left_overs(end)
            if not self._is_open:
                return
            inner = 0

    def _read_python(self, at: int) -> FindsPlace:
        """A call at `at`. Returns its end; -1 if there is none."""
        end = yield from self._word(at)
        if end < 0 or not self._takes(self._text[at:end]):
            return -1
        name = self._text[at:end]
        if (yield from self._after(end, "(")) < 0:
            return -1
        reader, read = _ParenthesisReader(), end
        while True:
            read = reader.feed(self._text, read)
            if reader.is_done or self._ended:
                break
            yield
        arguments = None
        if reader.is_done:
            arguments = _arguments(self._text[end:read], property_names(self._tools[name]))
            if arguments is None:
                return -1
        self._begin(name)
        self.is_cut = arguments is None
        self._argue(arguments or "", read)
        return 0


class Llama4Parser(PythonicParser):
    """The same between Llama 4's marks."""

    marker = "<|python_start|>"
    closing = "<|python_end|>"


class _ParenthesisReader:
    """Finds where Python's parenthesis ends: `feed` until `is_done`."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self.is_done = False

    def feed(self, text: str, start: int) -> int:
        """Read on from `text[start:]`. Returns where the parenthesis ends, or the text."""
        for at in range(start, len(text)):
            char = text[at]
            if self._quote:
                if self._escaped or char == "\\":
                    self._escaped = not self._escaped
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            else:
                self._depth += (char in "([{") - (char in ")]}")
                if self._depth == 0:
                    self.is_done = True
                    return at + 1
        return len(text)


def _arguments(parenthesis: str, names: list[str]) -> str | None:
    """Python's arguments as JSON; None if they are more than values. Those without a name get
    `names`, in order."""
    given: dict[str, Any] = {}
    try:
        call = ast.parse(f"f{parenthesis}", mode="eval").body
        if not isinstance(call, ast.Call):
            return None
        for index, value in enumerate(call.args):
            given[names[index]] = _value(value)
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            given[keyword.arg] = _value(keyword.value)
        return json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, IndexError, MemoryError, RecursionError):
        return None


def _value(node: ast.expr) -> Any:
    """The value that an expression is. Raises `ValueError` if it is to be computed."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            return ast.literal_eval(node)


def _key(node: ast.expr | None) -> Any:
    if node is None:
        raise ValueError("a dict is unpacked within another")
    return _value(node)
