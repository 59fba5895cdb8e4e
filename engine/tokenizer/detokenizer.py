"""Incremental detokenization: the text that each new token adds to one request."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.tokenizer.tokenizer import Tokenizer

MAX_HELD_TOKENS = 8
"""Tokens that `WindowDetokenizer` holds back at most; a character has up to 4 byte tokens."""


class IncrementalDetokenizer(ABC):
    """Text of one request's output tokens, as they come.

    Never returns a part of a character. An incomplete character is held back until the next tokens
    complete it, or show that the bytes are invalid. All the returned texts together are
    `Tokenizer.decode` of all the tokens (with the exceptions that `WindowDetokenizer` names).
    """

    __slots__ = ()

    @staticmethod
    def create(
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        *,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalDetokenizer:
        """The fastest detokenizer that is right for this tokenizer.

        The text goes on from `prompt_ids`: decoders that drop the first space of a text keep it
        behind a prompt. Some decoders put a space before each token; without
        `spaces_between_special_tokens` there is none between two special tokens.
        """
        if tokenizer.is_byte_level:
            return ByteLevelDetokenizer(tokenizer, skip_special_tokens)
        return WindowDetokenizer(
            tokenizer, skip_special_tokens, prompt_ids, spaces_between_special_tokens
        )

    @abstractmethod
    def add(self, token_id: int) -> str:
        """Take one token, return the text that is now complete (maybe none)."""

    @abstractmethod
    def flush(self) -> str:
        """The text still held back, incomplete bytes as U+FFFD, when no more tokens will come."""

    @abstractmethod
    def held_before(self, token_id: int) -> int:
        """Characters of the text held back that stand before what `token_id`, the next token, adds.
        A character that the token completes isn't among them."""


class ByteLevelDetokenizer(IncrementalDetokenizer):
    """For byte-level BPE: text is the UTF-8 decoding of the tokens' bytes, one after the other.

    Tokens that are whole characters are a dictionary lookup; others go through Python's
    incremental UTF-8 decoder, which replaces invalid bytes like Rust's (one U+FFFD for each
    maximal part of a character, Unicode 15 §3.9) and holds back at most 3 bytes.
    """

    __slots__ = ("_decoder", "_partial", "_skip", "_texts", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._texts = tokenizer.whole_texts[skip_special_tokens]
        self._decoder: codecs.IncrementalDecoder | None = None
        self._partial = False

    def add(self, token_id: int) -> str:
        if not self._partial:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        if self._skip and token_id in self._tokenizer.special_ids:
            data = b""
        else:
            data = self._tokenizer.token_bytes(token_id)
        if not self._partial:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                pass
            else:
                self._texts[token_id] = text
                return text
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._decoder.decode(data)
        self._partial = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        if not self._partial or self._decoder is None:
            return ""
        self._partial = False
        return self._decoder.decode(b"", final=True)

    def held_before(self, token_id: int) -> int:
        if not self._partial or self._decoder is None:
            return 0
        held = self._decoder.getstate()[0]
        following = self._tokenizer.token_bytes(token_id)[:1]
        if self._skip and token_id in self._tokenizer.special_ids:
            following = b""
        # Held bytes are the beginning of one character: they go on, or they are invalid.
        try:
            (held + following).decode()
        except UnicodeDecodeError as error:
            return 0 if error.reason == "unexpected end of data" else 1
        return 0


class WindowDetokenizer(IncrementalDetokenizer):
    """For any decoder: decodes a window of the last tokens, and sends the text added to it.

    The prefix_offset/read_offset algorithm of text-generation-inference (`decode_token`), also
    vLLM's `detokenize_incrementally`. The window begins with the tokens of the last text sent, so
    that the decoder treats the new ones as the middle of a text.

    Text that ends in U+FFFD or in a byte token (`<0x..>`) is held back: SentencePiece decoders
    replace every byte of a run of byte tokens as soon as one byte of the run is invalid. There is
    one exception: a run longer than `MAX_HELD_TOKENS` is sent in parts, which are decoded each for
    itself, so that the characters sent stay if the run turns invalid later. And without
    `spaces_between_special_tokens` the text lacks the space that the decoder puts before a special
    token directly behind another.

    `tokenizers.DecodeStream` is faster but does less: on random runs of byte tokens it raises
    "Invalid prefix" or gives other text than `decode`, and it has no flush (0.23.3).
    """

    __slots__ = ("_after_special", "_prefix", "_read", "_skip", "_spaces", "_tokenizer", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._after_special = False
        """Whether the last token was special and its text has been sent."""
        self._window: list[int] = []
        self._read = 0
        """How many of `_window` have been sent; their text is `_prefix`."""
        self._prefix = ""
        # One token is enough context for "in the middle of a text". A byte token would form one run
        # with those of the output, so behind a run of them any other token stands for the prompt.
        for token_id in map(int, reversed(prompt_ids)):
            if not tokenizer.is_visible(token_id, skip_special_tokens):
                continue
            context = tokenizer.plain_id if token_id in tokenizer.byte_ids else token_id
            if context is not None:
                self._start_window([context])
            break

    def add(self, token_id: int) -> str:
        if not self._tokenizer.is_visible(token_id, self._skip):
            return ""
        after_special, self._after_special = self._after_special, False
        self._window.append(token_id)
        if len(self._window) - self._read >= MAX_HELD_TOKENS:
            return self._send(self._count_whole())
        if token_id in self._tokenizer.byte_ids:
            return ""
        text = self._tokenizer.decode(self._window, self._skip)
        if text.endswith("\ufffd") or len(text) <= len(self._prefix):
            return ""
        new = self._send(len(self._window), text)
        if self._spaces or token_id not in self._tokenizer.special_ids:
            return new
        if after_special:
            new = new.removeprefix(" ")
        self._after_special = True
        return new

    def flush(self) -> str:
        return self._send(len(self._window))

    def held_before(self, token_id: int) -> int:
        if len(self._window) == self._read:
            return 0
        is_visible = self._tokenizer.is_visible(token_id, self._skip)
        goes_on = not is_visible or token_id in self._tokenizer.byte_ids
        count = self._count_whole() if goes_on else len(self._window)
        text = self._tokenizer.decode(self._window[:count], self._skip)
        return max(len(text) - len(self._prefix), 0)

    def _count_whole(self) -> int:
        """Tokens of the window before a character whose bytes are still coming."""
        tokenizer, end = self._tokenizer, len(self._window)
        start = end
        while start > self._read and self._window[start - 1] in tokenizer.byte_ids:
            start -= 1
        try:
            b"".join(map(tokenizer.token_bytes, self._window[start:])).decode()
        except UnicodeDecodeError as error:
            # Otherwise the bytes are invalid, and more bytes won't make them valid.
            if error.reason == "unexpected end of data":
                return start + error.start
        return end

    def _send(self, count: int, text: str | None = None) -> str:
        """Send the window's first `count` tokens, whose text is `text` if the caller has it."""
        if text is None:
            text = self._tokenizer.decode(self._window[:count], self._skip)
        new, rest = text[len(self._prefix) :], self._window[count:]
        is_cut = count > self._read and self._window[count - 1] in self._tokenizer.byte_ids
        if is_cut and (context := self._tokenizer.plain_id) is not None:
            # What follows of the run must not make these bytes invalid, which have been sent.
            self._start_window([context])
        elif new:
            self._start_window(self._window[self._read : count])
        else:
            # These tokens gave no text: the tokens before them stay the context.
            del self._window[self._read :]
        self._window += rest
        return new

    def _start_window(self, window: list[int]) -> None:
        self._window = window
        self._read = len(window)
        self._prefix = self._tokenizer.decode(window, self._skip)
