"""`NameBreaker`: puts a marker into the names of control tokens that a text holds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

_NOTHING = "(?!)"


class NameBreaker:
    """Breaks every occurrence of some names, so that no search for them finds one.

    The marker goes behind the first character: text that begins or ends with a name keeps its
    first and last characters, which templates may look at. `names` have two characters or more and
    none that is in `marker`.
    """

    def __init__(self, names: Collection[str], marker: str) -> None:
        self._marker = marker
        self._begin = re.compile(_names_pattern(names))
        # A name that two texts make together begins with a proper prefix, at the end of the one,
        # and ends with a proper suffix, at the beginning of the other.
        self._prefixes = frozenset(name[:cut] for name in names for cut in range(1, len(name)))
        self._suffixes = frozenset(name[cut:] for name in names for cut in range(1, len(name)))
        self._first = re.compile(_one_of({name[0] for name in names}))
        self._last = re.compile(_one_of({name[-1] for name in names}))
        self._longest = max(map(len, names), default=0)

    def break_names(self, text: str) -> str:
        """`text` with the marker in every name, also in names that overlap."""
        return self._begin.sub(self._add_marker, text)

    def break_text(self, text: str) -> str:
        """As `break_names`; nor can the text make a name with what a template puts beside it.

        That is so with and without the whitespace at the ends: templates trim.
        """
        text = self.break_names(text)
        end = len(text.rstrip())
        if self._ends_in_prefix(text[max(end - self._longest, 0) : end]):
            text = f"{text[:end]}{self._marker}{text[end:]}"
        start = len(text) - len(text.lstrip())
        if self._begins_with_suffix(text[start : start + self._longest]):
            text = f"{text[:start]}{self._marker}{text[start:]}"
        return text

    def break_value(self, value: Any) -> Any:
        """`value` (JSON) with `break_names` of every string, those of keys included.

        Raises `RecursionError` if the value is nested too deeply.
        """
        if isinstance(value, str):
            return self.break_names(value)
        if isinstance(value, Mapping):
            return {self.break_value(key): self.break_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.break_value(item) for item in value]
        return value

    def _add_marker(self, found: re.Match[str]) -> str:
        return found[0] + self._marker

    def _ends_in_prefix(self, text: str) -> bool:
        return any(text[found.start() :] in self._prefixes for found in self._first.finditer(text))

    def _begins_with_suffix(self, text: str) -> bool:
        return any(text[: found.end()] in self._suffixes for found in self._last.finditer(text))


def _names_pattern(names: Collection[str]) -> str:
    """Matches the first character of each occurrence of a name.

    What follows is only looked at, so occurrences may overlap. The pattern is a tree of characters:
    at one place the search takes the length of a name, however many names there are.
    """
    rests: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        rests[name[0]].append(name[1:])
    starts = [f"{re.escape(char)}(?={_tree(some)})" for char, some in sorted(rests.items())]
    return "|".join(starts) or _NOTHING


def _tree(words: Collection[str]) -> str:
    """Matches where one of `words` begins."""
    if "" in words:
        return ""
    rests: defaultdict[str, list[str]] = defaultdict(list)
    for word in words:
        rests[word[0]].append(word[1:])
    branches = [re.escape(char) + _tree(some) for char, some in sorted(rests.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _one_of(chars: Collection[str]) -> str:
    return f"[{''.join(map(re.escape, sorted(chars)))}]" if chars else _NOTHING
