"""Outputs as gpt-oss writes them: messages in channels (OpenAI's harmony format).

<|channel|>analysis<|message|>They ask for the weather.<|end|><|start|>assistant
<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The channel `analysis` is the thought, a message to a function is a call, all other messages are
text. `<|start|>assistant` of the first message stands in the prompt, `<|call|>` and `<|return|>`
end the output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from deploy.http.parsers.json_reader import WHITESPACE
from deploy.http.parsers.parts import CallArguments, Reasoning, Text
from deploy.http.parsers.tool_parser import (
    LEFT_OVERS,
    FindsPlace,
    ToolParser,
    Tools,
    Waits,
    length_of_beginning,
)
from engine.constraints.grammar_payload import Thinking

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
NEXT = f"{START}assistant"
ANALYSIS, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
NAMESPACE = "functions."
_HEADS = (CHANNEL, START, "to=")
"""What the head of a message begins with."""
_ENDS = (END, CALL, RETURN, NEXT)
"""What a message ends with; the last one begins another."""
_MAX_HEAD = 512
"""Characters of a message's head."""
_CUT_HEAD = re.compile(
    r"(<\|start\|>\w*)?( ?to=[\w.-]*)?"
    r"(<\|channel\|>\w*( to=[\w.-]*)?( ?<\|constrain\|>\w*| json)?)?"
)
_TO = re.compile(r"\bto=([^\s<]+)")
_IN = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(ToolParser):
    """Thoughts, calls and text of one output. Without tools there are no calls."""

    marker = CHANNEL

    def __init__(self, tools: Tools, channel: str = "") -> None:
        """`channel`: that of the message within which the prompt ends; "" if it ends before one."""
        self._channel = channel
        self._has_text = False
        self._begin_text = ""
        super().__init__(tools)
        self.is_reasoning = channel in ("", "analysis")
        self.is_within_reasoning = channel == "analysis"

    def _parse(self) -> Waits:
        yield
        if self._channel:
            yield from self._read_message(self._channel, "")
        while True:
            at = yield from self._skip_space(0)
            if at == len(self._text):
                if not (self._has_text or self.has_reasoned or self._num_calls):
                    self._give(at)
                return
            end = yield from self._head(at)
            if end < 0:
                yield from self._read_text(1 if self._text.startswith(NEXT, at) else 0)
                continue
            head = self._text[at:end]
            self._drop(end)
            channel, to = _IN.search(head), _TO.search(head)
            if head.endswith(MESSAGE):
                yield from self._read_message(channel[1] if channel else "", to[1] if to else "")

    def _head(self, at: int) -> FindsPlace:
        """The end of a message's head at `at`, or of the output within it; -1 if there is none."""
        while True:
            rest = self._text[at : at + _MAX_HEAD]
            if rest.startswith(_HEADS):
                line, line_end, _ = rest.partition("\n")
                if (found := line.find(MESSAGE)) >= 0:
                    return at + found + len(MESSAGE)
                if line_end or len(rest) == _MAX_HEAD:
                    return -1
            elif not any(head.startswith(rest) for head in _HEADS):
                return -1
            if self._ended:
                return len(self._text) if _CUT_HEAD.fullmatch(rest) else -1
            yield

    def _read_message(self, channel: str, recipient: str) -> Waits:
        """A message up to its end, which is dropped."""
        name = recipient.removeprefix(NAMESPACE)
        if self._tools and (name != recipient or name in self._tools):
            self.is_reasoning = False
            yield from self._read_call_of(name)
        elif channel == "analysis":
            yield from self._read_thought()
        else:
            yield from self._read_text()

    def _read_call_of(self, name: str) -> Waits:
        at = yield from self._skip_space(0)
        if self._text.startswith("{", at):
            yield from self._read_arguments(name, at)
            rest: list[str] = []
            yield from self._read_content(rest.append)
            self._say("".join(rest).strip(LEFT_OVERS))
            return
        self._begin(name)
        self.is_cut = True
        pieces: list[str] = []
        has_end = yield from self._read_content(pieces.append)
        arguments = "".join(pieces).strip(WHITESPACE)
        if has_end and not arguments:
            arguments = "{}"
        if arguments:
            self._parts.append(CallArguments(self._num_calls - 1, arguments))
        self.is_cut = not has_end and not _is_json(arguments)

    def _read_thought(self) -> Waits:
        """White space around a thought is dropped; a line end stands between two."""
        begin: str | None = "\n" if self.has_reasoned else ""
        held = ""
        self.has_reasoned = self.is_within_reasoning = True

        def take(text: str) -> None:
            nonlocal begin, held
            text = held + text
            kept = text.rstrip(WHITESPACE)
            held = text[len(kept) :]
            if kept and begin is not None:
                kept, begin = begin + kept.lstrip(WHITESPACE), None
            self._parts.append(Reasoning(kept))

        self.is_within_reasoning = not (yield from self._read_content(take))

    def _read_text(self, at: int = 0) -> Waits:
        """A line end stands between two texts. What stands before `at` is text in any case."""
        self.is_reasoning = False
        self._begin_text = "\n" if self._has_text else ""
        self._say(self._text[:at])
        self._drop(at)
        yield from self._read_content(self._say)

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(Text(self._begin_text + text))
            self._begin_text, self._has_text = "", True

    def _read_content(self, take: Callable[[str], None]) -> Generator[None, None, bool]:
        """Hand the text of a message to `take` as it comes, and drop its end. Returns whether it
        has one."""
        while True:
            found = [(at, mark) for mark in _ENDS if (at := self._text.find(mark)) >= 0]
            if found:
                at, mark = min(found)
                take(self._text[:at])
                self._drop(at if mark == NEXT else at + len(mark))
                return True
            held = 0
            if not self._ended:
                held = max(length_of_beginning(self._text, mark) for mark in _ENDS)
            take(self._text[: len(self._text) - held])
            self._drop(len(self._text) - held)
            if self._ended:
                return False
            yield


def read_channels(tools: Tools, thinking: Thinking | None) -> HarmonyParser:
    """The parser of an output. `thinking`: how it begins; None if the prompt ends within an
    answer."""
    if thinking is None:
        return HarmonyParser(tools, "final")
    return HarmonyParser(tools, "analysis" if thinking.is_open else "")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
