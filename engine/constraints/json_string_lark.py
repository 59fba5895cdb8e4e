"""`in_json_string`: the grammar of a text, as that of the text inside a JSON string.

A tool that takes a text has it as a string of its call's arguments. What the grammar says of the
text must hold once the string is read, so each character that JSON escapes is written escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from engine.constraints.grammar_payload import refused

# Python's own parser of regular expressions has no public name.
_sre = re._parser  # type: ignore[attr-defined]

_ESCAPED = {chr(code): json.dumps(chr(code))[1:-1] for code in (*range(32), ord('"'), ord("\\"))}
"""What a JSON string writes for the characters that it can't hold as they are."""
_NO_PLAIN = r'"\\\x00-\x1F'
"""The same as a part of a regular expression's class."""
_TOKENS = re.compile(
    r"""(?P<comment>//[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?![/*])(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<other>[^"/]+|/)""",
    re.VERBOSE,
)
_SLASH = "\\/"
"""What a slash is within the slashes of a regular expression."""
_COMMON = {
    "LF": r"/\n/",
    "CR": r"/\r/",
    "NEWLINE": r"/(\r?\n)+/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "ESCAPED_STRING": r'/"([^"\\]|\\.)*"/',
}
"""Terminals of `%import common` that hold characters which JSON escapes."""
_IMPORT = re.compile(r"^[ \t]*%import[ \t]+common\.(\w+)(?:[ \t]*->[ \t]*(\w+))?[ \t]*$", re.M)
_NOT_OURS = re.compile(
    r"^[ \t]*%(?!ignore\b|import\b|llguidance\b)(\w+)|%(json|regex|lark)\b", re.M
)


def in_json_string(lark: str) -> str:
    """The grammar, with escapes. Raises `RequestError` for what can't be written so."""
    if found := _NOT_OURS.search(lark):
        word = found[1] or found[2]
        raise refused(f"the grammar of a tool's input can't use %{word}")
    lark = _IMPORT.sub(_spelled_out, lark)
    return "".join(_written(token) for token in _TOKENS.finditer(lark))


def _spelled_out(found: re.Match[str]) -> str:
    name = found[1]
    return f"{found[2] or name}: {_COMMON[name]}" if name in _COMMON else found[0]


def _written(token: re.Match[str]) -> str:
    text = token[0]
    match token.lastgroup:
        case "string":
            body, _, flag = text.rpartition('"')
            return json.dumps(_escape(_read(body + '"')), ensure_ascii=False) + flag
        case "regex":
            body, _, flags = text[1:].rpartition("/")
            return f"/{escaped_regex(body.replace(_SLASH, '/'), flags)}/"
        case _:
            return text


def _read(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        raise refused(f"the grammar has the string {literal[:60]}, which isn't JSON") from None


def _escape(text: str) -> str:
    return "".join(_ESCAPED.get(char, char) for char in text)


def escaped_regex(pattern: str, flags: str = "") -> str:
    """The regular expression of what `pattern` matches, inside a JSON string. `flags`: letters as
    in `(?i)`. Raises `RequestError`."""
    try:
        parsed = _sre.parse(f"(?{flags}){pattern}" if flags else pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise refused(f"the grammar has a regular expression that is broken: {error}") from None
    return _Rewriter(parsed.state.flags).sequence(parsed).replace("/", _SLASH)


class _Rewriter:
    """Writes a parsed regular expression again, with escapes in place of what JSON escapes."""

    def __init__(self, flags: int) -> None:
        self._ignores_case = bool(flags & re.IGNORECASE)
        self._dot_is_all = bool(flags & re.DOTALL)

    def sequence(self, parsed: Iterable[tuple[Any, Any]]) -> str:
        return "".join(self._item(str(kind), value) for kind, value in parsed)

    def _item(self, kind: str, value: Any) -> str:
        match kind:
            case "LITERAL":
                return self._char(chr(value))
            case "NOT_LITERAL":
                return self._set(f"^{_in_class(value)}")
            case "ANY":
                return self._set(r"^\n" if not self._dot_is_all else "^")
            case "IN":
                return self._set("".join(_class_items(value)))
            case "BRANCH":
                return f"(?:{'|'.join(map(self.sequence, value[1]))})"
            case "SUBPATTERN":
                return f"(?:{self.sequence(value[-1])})"
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                end = "" if most == _sre.MAXREPEAT else str(most)
                return f"(?:{self.sequence(inner)}){{{least},{end}}}"
            case "AT" if str(value) in ("AT_BEGINNING", "AT_END", "AT_END_STRING"):
                return ""  # a terminal matches as a whole
            case _:
                raise refused(f"the grammar has a regular expression with {kind.lower()}")

    def _char(self, char: str) -> str:
        if char in _ESCAPED:
            return re.escape(_ESCAPED[char])
        return self._cased(re.escape(char))

    def _set(self, inner: str) -> str:
        """`inner`: what stands in the brackets of a class."""
        pattern = re.compile(f"[{inner}]" if inner != "^" else r"[\s\S]")
        escapes = _escapes(text for char, text in _ESCAPED.items() if pattern.fullmatch(char))
        negated = inner.startswith("^")
        plain = f"[{inner}{_NO_PLAIN}]" if negated else f"[[{inner}]--[{_NO_PLAIN}]]"
        return f"(?:{'|'.join([self._cased(plain), *escapes])})"

    def _cased(self, text: str) -> str:
        return f"(?i:{text})" if self._ignores_case else text


def _escapes(texts: Iterable[str]) -> list[str]:
    """A short regular expression of some escapes, in parts."""
    found = list(texts)
    short = "".join(re.escape(text[1]) for text in found if len(text) == 2)
    codes = "|".join(text[4:] for text in found if len(text) > 2)
    parts = [rf"\\[{short}]"] if short else []
    return parts + ([rf"\\u00(?:{codes})"] if codes else [])


def _class_items(items: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    for kind, value in items:
        match str(kind):
            case "NEGATE":
                yield "^"
            case "LITERAL":
                yield _in_class(value)
            case "RANGE":
                yield f"{_in_class(value[0])}-{_in_class(value[1])}"
            case "CATEGORY":
                yield _CATEGORIES[str(value)]


_CATEGORIES = {
    "CATEGORY_DIGIT": r"0-9",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r" \t\n\r\f\v",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}


def _in_class(code: int) -> str:
    """A character in the brackets of a class, in Python's words and llguidance's."""
    char = chr(code)
    if char.isalnum() or code > 127:
        return char
    return f"\\x{code:02X}"
