"""Readers of JSON that comes in pieces. They take as much as belongs to the value, and no more.

What a model writes need not be JSON. The readers find where a value ends by its brackets and
quotes; whether it is valid inside is not checked.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from pydantic_core import from_json

WHITESPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\{}\[\]]+')
_IN_STRING = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[^,}\]\s]+")


class ValueReader:
    """Reads one value: `feed` until `is_done`. The first character must be the value's."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._first = ""
        self.is_done = False

    def feed(self, text: str, start: int) -> int:
        """Read on from `text[start:]`. Returns where the value ends, or the text."""
        at, end = start, len(text)
        if at < end and not self._first:
            self._first = text[at]
        if self._first and self._first not in '"{[':
            return self._scalar(text, at)
        while at < end and not self.is_done:
            at = self._in_a_string(text, at) if self._in_string else self._outside(text, at)
        return at

    def _scalar(self, text: str, at: int) -> int:
        found = _SCALAR.match(text, at)
        at = found.end() if found else at
        self.is_done = at < len(text)
        return at

    def _in_a_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        if found := _IN_STRING.match(text, at):
            return found.end()
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.is_done = self._depth == 0
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        if found := _PLAIN.match(text, at):
            return found.end()
        match text[at]:
            case '"':
                self._in_string = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                self.is_done = self._depth == 0
        return at + 1


class _At(Enum):
    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class CallReader:
    """Reads one call as an object: `{"name": ..., "arguments": {...}}`, in any order.

    `arguments` may be called `parameters`, and may be a string, which is read as their text. Other
    values are kept as they are. Further keys are ignored. The call is `begun` when its name and the
    first of its arguments are known, or its end. Then it stays a call, whatever follows.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.failed = False
        """The text isn't such a call. Once a call has begun: not any more."""
        self._at = _At.OPEN
        self._may_close = True
        self._key = ""
        self._value: ValueReader | None = None
        self._text = ""
        """The key or value that is being read."""
        self._arguments: list[str] = []
        self._has_arguments = False
        self._arguments_ended = False

    @property
    def begun(self) -> bool:
        """Whether this is a call."""
        return self.name is not None and (self._has_arguments or self.is_done)

    @property
    def is_whole(self) -> bool:
        """Whether all arguments have come, though the call may not be closed."""
        return self.is_done or self._arguments_ended

    def end(self) -> None:
        """No more text comes. A call whose name is known has begun, with what came of it."""
        if self.is_done or self.failed or self.name is None or self._has_arguments:
            return
        self._has_arguments = True
        if self._is_arguments and self._value is not None:
            self._arguments.append(_text_of(self._text))

    def feed(self, text: str, start: int) -> int:
        """Read on from `text[start:]`. Returns where the call ends or goes wrong, or the text."""
        at = start
        while at < len(text) and not (self.is_done or self.failed):
            if self._value is not None:
                at = self._read_value(text, at)
            elif text[at] in WHITESPACE:
                at += 1
            else:
                at += self._structure(text[at])
        return at

    def take_arguments(self) -> str:
        """What has come of the arguments since the last call; "" until the call has begun."""
        if not self.begun:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        if self.is_done and not self._has_arguments:
            self._has_arguments, text = True, "{}"
        return text

    def _structure(self, char: str) -> int:
        """Take a character between values; returns how many were taken."""
        if self._at is _At.OPEN and char == "{":
            self._at = _At.KEY
        elif self._at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif self._at is _At.COMMA and char == ",":
            self._at, self._may_close = _At.KEY, False
        elif char == "}" and (self._at is _At.COMMA or (self._at is _At.KEY and self._may_close)):
            self.is_done = True
            self.failed = self.name is None
        elif (self._at is _At.KEY and char == '"') or self._at is _At.VALUE:
            self._value, self._text = ValueReader(), ""
            return 0
        else:
            self.failed = True
            return 0
        return 1

    @property
    def _is_arguments(self) -> bool:
        named = self._key in ("arguments", "parameters")
        return named and self._at is _At.VALUE and not self._arguments_ended

    def _read_value(self, text: str, at: int) -> int:
        assert self._value is not None
        end = self._value.feed(text, at)
        piece = text[at:end]
        if self._is_arguments and (self._text or piece).startswith("{"):
            self._has_arguments = True
            self._arguments.append(piece)
            self._text = "{"
        else:
            self._text += piece
        if self._value.is_done:
            self._value = None
            self._end_value()
        return end

    def _end_value(self) -> None:
        if self._at is _At.KEY:
            self._key, self._at = self._string(), _At.COLON
            return
        if self._key == "name" and self.name is None:
            self.name = self._string()
        elif self._is_arguments:
            if self._text != "{":
                self._end_other_arguments()
            self._arguments_ended = True
        self._at = _At.COMMA

    def _end_other_arguments(self) -> None:
        """Arguments that are no object. Models write null or an empty string for none."""
        text = _text_of(self._text)
        if text.strip() and self._text != "null":
            self._has_arguments = True
            self._arguments.append(text)

    def _string(self) -> str:
        try:
            value = json.loads(self._text)
        except ValueError:
            value = None
        if not isinstance(value, str):
            self.failed = True
            return ""
        return value


def _text_of(value: str) -> str:
    """The text of a JSON string, which may be cut off; another value as it is."""
    try:
        text = from_json(value, allow_partial="trailing-strings")
    except ValueError:
        return value
    return text if isinstance(text, str) else value


class TextFieldReader:
    """The text in `{"name": "text"}`, piece by piece. Arguments of another form are passed on as
    they are."""

    def __init__(self, name: str) -> None:
        self._begin = re.compile(rf'\s*\{{\s*"{re.escape(name)}"\s*:\s*"')
        self._beginning = f'{{"{name}":"'
        self._held = ""
        self._at = _TextAt.BEGIN

    def feed(self, text: str) -> str:
        """What is known of the text now."""
        self._held += text
        if self._at is _TextAt.BEGIN:
            if found := self._begin.match(self._held):
                self._held, self._at = self._held[found.end() :], _TextAt.TEXT
            elif not self._beginning.startswith("".join(self._held.split())):
                self._at = _TextAt.OTHER
        match self._at:
            case _TextAt.TEXT:
                return self._read()
            case _TextAt.OTHER:
                return self._take_rest()
            case _TextAt.BEGIN:
                return ""
            case _TextAt.END:
                self._held = ""
                return ""

    def finish(self) -> str:
        """What is left when the arguments have ended."""
        return "" if self._at is _TextAt.END else self._take_rest()

    def _read(self) -> str:
        found = _WHOLE_CHARACTERS.match(self._held)
        assert found is not None
        text, self._held = found[0], self._held[found.end() :]
        if self._held.startswith('"'):
            self._at = _TextAt.END
        try:
            read = str(json.loads(f'"{text}"', strict=False))
        except ValueError:  # an escape that JSON doesn't have
            return text
        # Half of a pair of escapes isn't a character.
        return read.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _take_rest(self) -> str:
        rest, self._held = self._held, ""
        return rest


class _TextAt(Enum):
    BEGIN = auto()
    TEXT = auto()
    END = auto()
    OTHER = auto()


_WHOLE_CHARACTERS = re.compile(
    r'(?:[^"\\]'
    r"|\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}"
    r"|\\u(?![dD][89aAbB])[0-9a-fA-F]{4}"
    r"|\\[^u])*"
)
"""Characters of a JSON string, but not the beginning of an escape whose rest is to come."""
