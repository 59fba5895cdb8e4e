"""`ReasoningParser`: tells what a model thinks from what it answers."""

from __future__ import annotations

from deploy.http.parsers.json_reader import WHITESPACE
from deploy.http.parsers.parts import Part, Reasoning
from deploy.http.parsers.tool_parser import length_of_beginning
from engine.constraints.grammar_payload import Thinking


class ReasoningParser:
    """Reads one output up to the end of its reasoning; `rest` is what follows.

    White space around the reasoning is dropped. If the output ends before `end`, all of it is
    reasoning. An output that has no reasoning stays as it is.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._start, self._end = thinking.start, thinking.end
        self._is_open = thinking.is_open
        self.has_begun = self.is_closed = False
        """Whether there is reasoning; whether its end was found."""
        self._has_given = False
        self._text = ""
        """What wasn't given out so far."""
        self.is_done = False
        self.rest = ""
        """The answer so far, once `is_done`."""

    def feed(self, text: str) -> list[Part]:
        """The reasoning that `text` adds."""
        self._text += text
        if not self.has_begun and not self._begin():
            return []
        given: list[Part] = []
        if not self.is_closed:
            at = self._text.find(self._end)
            self.is_closed = at >= 0
            if not self.is_closed:
                return self._give(len(self._text) - length_of_beginning(self._text, self._end))
            given = self._give(at)
            self._text = self._text[self._text.find(self._end) + len(self._end) :]
        self._text = self._text.lstrip(WHITESPACE)
        self.is_done, self.rest = bool(self._text), self._text
        return given

    @property
    def is_within(self) -> bool:
        """Whether the output so far ends within the reasoning."""
        return (self.has_begun or self._is_open) and not self.is_closed

    def finish(self) -> list[Part]:
        """What is left at the end of the output."""
        self.is_done = True
        if self.is_within:
            return self._give(len(self._text))
        self.rest = self._text
        return []

    def _begin(self) -> bool:
        """Find out whether the output begins with reasoning. True once that is so."""
        text = self._text.lstrip(WHITESPACE)
        if text.startswith(self._start):
            self._text, self.has_begun = text[len(self._start) :], True
        elif not self._start.startswith(text):
            self.has_begun = self._is_open
            if not self._is_open:
                self.is_done, self.rest = True, self._text
        return self.has_begun

    def _give(self, end: int) -> list[Part]:
        """Give out what stands before `end`, but not white space at its end."""
        piece = self._text[:end].rstrip(WHITESPACE)
        self._text = self._text[len(piece) :]
        if not self._has_given:
            piece = piece.lstrip(WHITESPACE)
        self._has_given = self._has_given or bool(piece)
        return [Reasoning(piece)] if piece else []
