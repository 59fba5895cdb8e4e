"""`Thought`: what of an output's text is thought, and what is answer."""

from __future__ import annotations

from engine.constraints.grammar_payload import Thinking


class Thought:
    """Splits one output's text as it comes.

    The answer begins with its first character that isn't white space. Until it is known whether the
    output begins with a thought, text is held back: white space and a beginning of `start`. Where
    a mark stands before answers (`Thinking.answer`), all before it counts as thought.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._start, self._end = thinking.start, thinking.before_answer
        self._has_begun = thinking.is_open or bool(thinking.answer)
        self._tail = ""
        """The end of the thought, where `end` may have begun."""
        self.held = ""
        self.is_over = False
        """Whether the thought has ended, or it is known that there is none."""
        self.has_answer = False

    def feed(self, text: str) -> tuple[str, str]:
        """What `text` adds to the thought and to the answer."""
        if self.has_answer:
            return "", text
        if not self._has_begun and not self.is_over:
            text, self.held = self.held + text, ""
            if self._may_begin(text):
                self.held = text
                return "", ""
            self._has_begun = text.lstrip().startswith(self._start)
            if not self._has_begun:
                self.is_over = self.has_answer = True
                return "", text
        thought = 0
        if not self.is_over:
            seen = self._tail + text
            at = seen.find(self._end)
            if at < 0:
                self._tail = seen[-len(self._end) + 1 :]
                return text, ""
            self.is_over = True
            thought = at + len(self._end) - len(self._tail)
        answer = text[thought:].lstrip()
        self.has_answer = bool(answer)
        return text[: len(text) - len(answer)], answer

    def answers(self, text: str) -> bool:
        """Whether a token of this text belongs to the answer. It isn't taken in."""
        if self.has_answer or self.is_over:
            return self.has_answer or not text.isspace()
        return not self._has_begun and not self._is_thought(self.held + text)

    def flush(self) -> str:
        """The text that was held back; called when no more text comes."""
        held, self.held = self.held, ""
        return held

    def _may_begin(self, text: str) -> bool:
        """Whether `text` may be the beginning of a thought's `start`."""
        return self._start.startswith(text.lstrip()) and text.lstrip() != self._start

    def _is_thought(self, text: str) -> bool:
        return self._may_begin(text) or text.lstrip().startswith(self._start)
