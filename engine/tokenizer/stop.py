"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Finds the stop string that completes first in text that arrives in pieces.

    The first one is the one that ends first, because generation stops there; of several that end
    there, the longest counts. So the result doesn't depend on how the text is cut.
    Text that may turn out to be the beginning of a stop string is held back, unless stop strings
    belong to the output anyway.

    Each stop string is matched with Knuth-Morris-Pratt (1977), which is linear in the text also for
    hostile stop strings. While nothing has matched, `str.find` looks for the first character.
    """

    def __init__(
        self, stop: Sequence[str], include_stop_str_in_output: bool = False, mark: str = ""
    ) -> None:
        """`mark`: the end of a thought. Stop strings that hold it count in the thought, too."""
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self._patterns = [_Pattern(text) for text in dict.fromkeys(stop)]
        self._of_mark = [pattern for pattern in self._patterns if mark and mark in pattern.text]
        self._include = include_stop_str_in_output
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing is returned after it."""

    def feed(self, text: str) -> str:
        """Take the next piece, return the text that is certain not to be part of a stop string."""
        return self._feed(text, self._patterns)

    def feed_thought(self, text: str) -> str:
        """As `feed`, for a piece of the thought: there only the stop strings with its mark count.
        No piece of the answer came before."""
        return self._feed(text, self._of_mark)

    def _feed(self, text: str, patterns: list[_Pattern]) -> str:
        if self.matched is not None:
            return ""
        end = len(text) + 1
        for pattern in patterns:
            found = pattern.advance(text)
            if found < 0 or found > end:
                continue
            if found < end or len(pattern.text) > len(self.matched or ""):
                end, self.matched = found, pattern.text
        if self.matched is None:
            return self._release(text)
        buffer = self._held + text[:end]
        self._held = ""
        return buffer if self._include else buffer[: -len(self.matched)]

    def pass_over(self, text: str) -> str:
        """As `feed`, but stop strings that end in this piece don't count (`min_tokens`)."""
        return self._pass_over(text, self._patterns)

    def pass_over_thought(self, text: str) -> str:
        """As `pass_over`, for a piece of the thought."""
        return self._pass_over(text, self._of_mark)

    def _pass_over(self, text: str, patterns: list[_Pattern]) -> str:
        if self.matched is not None:
            return ""
        for pattern in patterns:
            done = 0
            while (found := pattern.advance(text[done:])) >= 0:
                done += found
        return self._release(text)

    def flush(self) -> str:
        """The text that was held back; called when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _release(self, text: str) -> str:
        if self._include:
            return text
        buffer = self._held + text
        kept = len(buffer) - max((pattern.progress for pattern in self._patterns), default=0)
        self._held = buffer[kept:]
        return buffer[:kept]


class _Pattern:
    """One stop string; `progress` of its characters match the end of the text so far."""

    __slots__ = ("_failure", "progress", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.progress = 0
        # failure[i]: length of the longest proper prefix of text[: i + 1] that also ends it.
        self._failure = [0] * len(text)
        k = 0
        for i in range(1, len(text)):
            while k and text[k] != text[i]:
                k = self._failure[k - 1]
            k += text[k] == text[i]
            self._failure[i] = k

    def advance(self, text: str) -> int:
        """End of the first occurrence that completes in `text`, or -1 if none does.

        Text behind the occurrence isn't read; `progress` is then as after the occurrence.
        """
        pattern, failure, k = self.text, self._failure, self.progress
        i = 0
        while i < len(text):
            if k == 0:
                i = text.find(pattern[0], i)
                if i < 0:
                    break
                k = 1
            else:
                char = text[i]
                while k and pattern[k] != char:
                    k = failure[k - 1]
                k += pattern[k] == char
            i += 1
            if k == len(pattern):
                self.progress = failure[-1]
                return i
        self.progress = k
        return -1
