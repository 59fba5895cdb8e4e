"""`ToolParser`: finds the tool calls in a model's text, piece by piece.

What isn't a call comes out as text, unchanged. A call that has begun stays one, whatever follows:
clients have read of it already. What models leave around calls (brackets too many, commas,
semicolons, markers that come twice) is dropped. So the parts don't depend on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from typing import Any

from deploy.http.parsers.json_reader import WHITESPACE, CallReader, ValueReader
from deploy.http.parsers.parts import CallArguments, CallBegin, Part, Text, joined

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments by name of each tool that may be called."""
LEFT_OVERS = WHITESPACE + ",;}]"
"""What may stand behind a call and says nothing."""
Waits = Generator[None, None, None]
"""Yields where it needs more text, or to know that there is none."""
FindsPlace = Generator[None, None, int]
"""The same; returns a place in the text, or -1."""
_WORD = re.compile(r"[\w.-]+")


class ToolParser:
    """Reads one output. Subclasses know how a model writes calls."""

    marker: str
    """Where it stands, calls may follow."""
    closing: str = ""
    """Stands behind the calls; "" if nothing does."""
    other_markers: tuple[str, ...] = ()
    """Further forms of the marker."""
    bare: str = ""
    """Begins a call that lacks the marker."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        """What was neither given out nor dropped so far."""
        self._ended = False
        self._parts: list[Part] = []
        self._num_calls = 0
        self.is_cut = False
        """Whether the last call that has begun lacks arguments."""
        self.is_reasoning = self.has_reasoned = self.is_within_reasoning = False
        """Of forms in which thoughts and calls alternate: whether thoughts may still come, whether
        there was one, whether the output so far ends within one."""
        self._is_open = False
        """Whether `closing` is still to come."""
        self._run = self._parse()
        next(self._run)

    def feed(self, text: str) -> list[Part]:
        """The parts that are known now that `text` has come."""
        self._text += text
        return self._go_on()

    def finish(self) -> list[Part]:
        """The parts that are left when the output has ended."""
        self._ended = True
        return self._go_on()

    def _go_on(self) -> list[Part]:
        self._parts = []
        next(self._run, None)
        return joined(self._parts)

    def _parse(self) -> Waits:
        """The whole output, until it has ended."""
        while True:
            at = yield from self._seek()
            if at < 0:
                return
            before = self._num_calls
            behind = yield from self._skip_markers(at)
            yield from self._read_calls(behind)
            if self._num_calls == before:
                self._give(max(behind, at + len(self.bare)))

    def _read_calls(self, at: int) -> Waits:
        """Calls as objects or in a list, one behind the other at `at`, behind a marker. Drops what
        belongs to them and what is left over behind them."""
        at = yield from self._skip_space(at)
        opened = yield from self._after(at, "[")
        at = max(opened, at)
        while True:
            at = yield from self._skip_space(at)
            at = yield from self._read_call(at)
            if at < 0:
                return
            yield from self._drop_left_overs(at)
            at = 0
            if not self._text.startswith("{") or (self.closing and not self._is_open):
                return

    # What subclasses are made of. Each place is one in `_text`; what begins a call drops the text
    # before it, and all places with it.

    def _give(self, end: int) -> None:
        """What stands before `end` is text."""
        self._parts.append(Text(self._text[:end]))
        self._text = self._text[end:]

    def _drop(self, end: int) -> None:
        """What stands before `end` belongs to a call."""
        self._text = self._text[end:]

    @property
    def _markers(self) -> tuple[str, ...]:
        return (self.marker, *self.other_markers)

    def _seek(self) -> FindsPlace:
        """Give out text up to a marker or a bare call, but not white space before it. -1 if the
        output ends. Drops what closes the calls so far."""
        words = (*self._markers, self.bare) if self.bare else self._markers
        while True:
            closing = self.closing if self._is_open else ""
            at, closes = _first_of(words, self._text), self._text.find(closing) if closing else -1
            if closes >= 0 and not 0 <= at < closes:
                self._give(len(self._text[:closes].rstrip(WHITESPACE)))
                yield from self._drop_left_overs(self._text.find(closing))
                continue
            if at >= 0:
                self._give(len(self._text[:at].rstrip(WHITESPACE)))
                return _first_of(words, self._text)
            cut = length_of_beginning(self._text, closing)
            if self._ended:
                kept = self._text[: len(self._text) - cut]
                self._give(len(kept.rstrip(WHITESPACE) if self._num_calls else kept))
                return -1
            held = max(length_of_beginning(self._text, word) for word in words)
            maybe = len(self._text) - max(cut, held)
            self._give(len(self._text[:maybe].rstrip(WHITESPACE)))
            yield

    def _skip_markers(self, at: int) -> FindsPlace:
        """The place behind markers at `at`: models may write them twice."""
        while True:
            begin = yield from self._skip_space(at)
            for marker in self._markers:
                behind = yield from self._after(begin, marker)
                if behind >= 0:
                    break
            else:
                return at
            at = behind

    def _skip_space(self, at: int) -> FindsPlace:
        """The first place from `at` on without white space."""
        while True:
            while at < len(self._text) and self._text[at] in WHITESPACE:
                at += 1
            if at < len(self._text) or self._ended:
                return at
            yield

    def _drop_left_overs(self, at: int) -> Waits:
        """Drop what stands before `at`, the end of a call, and what is left over there."""
        end = at
        while True:
            while end < len(self._text) and self._text[end] in LEFT_OVERS:
                end += 1
            if end == len(self._text) and not self._ended:
                yield
                continue
            behind = (yield from self._after(end, self.closing)) if self.closing else -1
            if behind < 0:
                break
            end, self._is_open = behind, False
        if self._ended and self._is_open and self.closing.startswith(self._text[end:]):
            end = len(self._text)  # what closes the calls was cut
        is_text = end < len(self._text) and self._text[end] not in "{["
        while is_text and end > at and self._text[end - 1] in WHITESPACE:
            end -= 1
        self._text = self._text[end:]

    def _after(self, at: int, word: str) -> FindsPlace:
        """The place behind `word`; -1 if it doesn't stand at `at`."""
        while not self._text.startswith(word, at):
            if self._ended or not word.startswith(self._text[at:]):
                return -1
            yield
        return at + len(word)

    def _behind(self, at: int, word: str) -> FindsPlace:
        """As `_after`; the text's end if the output ends within `word`."""
        behind = yield from self._after(at, word)
        is_cut = behind < 0 and self._ended and word.startswith(self._text[at:])
        return len(self._text) if is_cut else behind

    def _until(self, at: int, word: str) -> FindsPlace:
        """The place of `word` at `at` or behind it; -1 if the output ends before."""
        seen = at
        while (found := self._text.find(word, seen)) < 0:
            if self._ended:
                return -1
            seen = max(at, len(self._text) - len(word) + 1)
            yield
        return found

    def _word(self, at: int) -> FindsPlace:
        """The end of the word at `at`; -1 if there is none."""
        while True:
            found = _WORD.match(self._text, at)
            if found and (found.end() < len(self._text) or self._ended):
                return found.end()
            if self._ended or (not found and at < len(self._text)):
                return -1
            yield

    def _read_call(self, at: int) -> FindsPlace:
        """A call as an object with `name` and `arguments`. Returns its end; -1 if there is none."""
        reader, begun = CallReader(), False
        while True:
            at = reader.feed(self._text, at)
            if self._ended:
                reader.end()
            if reader.begun and not begun:
                if not self._takes(reader.name or ""):
                    return -1
                begun = True
                self._begin(reader.name or "")
            if begun:
                self._argue(reader.take_arguments(), at)
                at = 0
            if reader.is_done or reader.failed or self._ended:
                self.is_cut = begun and not reader.is_whole
                return at if begun else -1
            yield

    def _read_arguments(self, name: str, at: int) -> FindsPlace:
        """The arguments of a call of `name`: an object at `at`. Returns its end."""
        self._begin(name)
        reader = ValueReader()
        while True:
            end = reader.feed(self._text, at)
            self._argue(self._text[at:end], end)
            at = 0
            if reader.is_done or self._ended:
                self.is_cut = not reader.is_done
                return at
            yield

    def _takes(self, name: str) -> bool:
        """Whether a call of `name` is taken for one."""
        return True

    def _begin(self, name: str) -> None:
        self._parts.append(CallBegin(self._num_calls, name))
        self._num_calls += 1
        self._is_open = True

    def _argue(self, text: str, end: int) -> None:
        if text:
            self._parts.append(CallArguments(self._num_calls - 1, text))
        self._text = self._text[end:]


def _first_of(words: tuple[str, ...], text: str) -> int:
    """The first place of any of the words; -1 if there is none."""
    return min((at for word in words if (at := text.find(word)) >= 0), default=-1)


def length_of_beginning(text: str, word: str) -> int:
    """How many characters at the end of `text` may be the beginning of `word`."""
    for length in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
