"""`OutputStops`: stop strings, and stop ids of models that think, in one output."""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.protocol.sampling_params import SamplingParams
from engine.tokenizer.stop import StopChecker
from engine.tokenizer.thought import Thought


class OutputStops:
    """Looks for what ends an output. In a thought only stops that hold its end mark count.

    Without a thought the scheduler looks for stop ids: it can stop without a step in vain.
    """

    def __init__(self, params: SamplingParams) -> None:
        thinking = params.thinking
        mark = "" if thinking is None else thinking.before_answer
        self._mark = mark
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output, mark)
        self._thought = None if thinking is None else Thought(thinking)
        self._ids: Collection[int] = () if thinking is None else frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._held_until = 0
        """Output tokens when the thought last held text back."""
        self._token: int | None = None

    @property
    def matched(self) -> str | int | None:
        """The stop string or id that was found; nothing is returned after it."""
        return self._checker.matched if self._token is None else self._token

    def add_token(self, token_id: int, name_of: Callable[[int], str]) -> bool:
        """Whether a token ends the output by its id. `name_of` gives its text, also if that isn't
        shown."""
        if self._thought is None or token_id not in self._ids:
            return False
        name = name_of(token_id)
        if self._mark in name or self._thought.answers(name):
            self._token = token_id
        return self._token is not None

    def hide(self, name: str, num_output: int) -> str:
        """Take in a token whose `name` isn't shown. Returns the text that may go out."""
        if self._thought is None or self._thought.has_answer:
            return ""
        held = self._thought.held
        self._thought.feed(name)
        if not held or self._thought.held:
            return ""
        return self._check_answer(held, num_output) if self._thought.has_answer else held

    def feed(self, text: str, num_output: int) -> str:
        """Take the next piece, the text of the output's token number `num_output`. Returns the
        text that may go out."""
        if self._thought is None:
            return self._check_answer(text, num_output)
        held = self._thought.held
        thought, answer = self._thought.feed(text)
        shown = self._check_thought(thought, num_output) if thought else ""
        if held and answer and not thought:
            # What was held back is the answer's; it came with earlier tokens.
            shown += self._check_answer(held, self._held_until)
            answer = answer[len(held) :]
        if self._thought.held:
            self._held_until = num_output
        return shown + (self._check_answer(answer, num_output) if answer else "")

    def flush(self) -> str:
        """The text that was held back; called when no more text comes."""
        text = ""
        if self._thought is not None and (held := self._thought.flush()):
            text = self._check_answer(held, self._held_until)
        return text if self._checker.matched is not None else text + self._checker.flush()

    def _check_thought(self, text: str, num_output: int) -> str:
        if num_output <= self._min_tokens:
            return self._checker.pass_over_thought(text)
        return self._checker.feed_thought(text)

    def _check_answer(self, text: str, num_output: int) -> str:
        # As in vLLM: stop strings that end within the first min_tokens tokens don't count.
        if num_output <= self._min_tokens:
            return self._checker.pass_over(text)
        return self._checker.feed(text)
