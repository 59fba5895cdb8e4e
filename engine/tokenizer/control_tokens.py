"""Control tokens, and the difference between their names in a template and in a request.

The names of a model's control tokens, such as `<|im_end|>`, stand for the tokens where the chat
template writes them. In what a request brings they are only text: a user who writes `<|im_end|>`
must not close a turn.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.errors import RequestError
from engine.tokenizer.encoding import encode_texts
from engine.tokenizer.marked_text import MarkedTextEncoder
from engine.tokenizer.name_breaker import NameBreaker

logger = logging.getLogger(__name__)

_MARKER_LENGTH = 32
# Most names hold none of these; JSON and case filters of a template leave them as they are.
_MARKER_CHARS = "~^`;%@&\ufdd0\ufdd1"
_MARKUP = frozenset("<>[]{}|")
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "thinking")
"""Keys of a message whose texts stand beside a template's own text, without quotes."""


class ControlTokens:
    """The control tokens of one tokenizer: all special tokens, and other added tokens like them.

    An added token that isn't special counts if its name is markup, such as `<tool_call>`. Others
    are ordinary text that the tokenizer looks for first: words, runs of spaces, "->". So are all
    names of one character, special or not.

    The way of a name through a prompt:

    1. `break_message` and `NameBreaker.break_value` put a marker into every name of the request:
       `<`, marker, `|im_end|>`. A marker also goes to the ends of a message's text where it could
       make a name with the text beside it.
    2. The template renders. Its own names hold no marker.
    3. `encode` finds the tokens by their names, drops the markers, and encodes the rest. A prompt
       without markers goes through the model's own tokenizer.

    What a template itself does to the request's strings after that can still make a name: putting
    one between a name's beginning and end (`<|` role `|>`: take roles from a fixed set), or cutting
    pieces out of texts.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = list(backend.get_added_tokens_decoder().values())
        control = [token for token in added if _is_control(token)]
        self.marker = _make_marker(token.content for token in added)
        """Drawn at random, so that no text holds it by chance. Nothing depends on its secrecy: in
        a text a marker can only break a name."""
        self.names = frozenset(token.content for token in control)
        self.every = NameBreaker(self.names, self.marker)
        self.special = NameBreaker({t.content for t in control if t.special}, self.marker)
        self._backend = backend
        # A name that the tokenizer finds only behind its normalizer (in other case, say) can't be
        # broken before it.
        self._always_marked = backend.normalizer is not None and any(
            token.normalized for token in control
        )

    def prepare(self) -> None:
        """Build what the first prompt with markers needs.

        That takes milliseconds, but for a vocabulary that must be copied (see `MarkedTextEncoder`)
        1 s per 100,000 pieces, in which nothing else is tokenized.
        """
        _ = self._encoder

    def break_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """`message` with broken names.

        In the texts of assistant messages only special tokens are broken: templates look for the
        others there, as when they drop the reasoning before `</think>` from earlier replies.
        """
        texts = self.special if message.get("role") == "assistant" else self.every
        return {
            key: self._break_texts(texts, value)
            if key in _TEXT_KEYS
            else self.every.break_value(value)
            for key, value in message.items()
        }

    def unmark(self, text: str) -> str:
        """`text` without markers."""
        return text.replace(self.marker, "")

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered prompt with markers; names that hold none become their tokens.

        Raises `RequestError` if the text isn't valid Unicode, or holds a name in a request's text
        that can't be told from the token.
        """
        if not self._always_marked and self.marker not in text:
            return encode_texts(self._backend, [text], False)[0]
        if self._encoder is None:
            raise RequestError(
                "the messages hold the name of a control token, and with this model's tokenizer "
                "it can't be told from the token: leave the name out"
            )
        return self._encoder.encode(text)

    @cached_property
    def _encoder(self) -> MarkedTextEncoder | None:
        """None if there can't be one; then names in requests are refused."""
        try:
            return MarkedTextEncoder(self._backend, self.names, self.marker)
        except Exception:  # the package raises plain Exception
            logger.exception("chats that hold names of control tokens will be refused")
            return None

    def _break_texts(self, texts: NameBreaker, value: Any) -> Any:
        if isinstance(value, str):
            return texts.break_text(value)
        if isinstance(value, list):
            # Content parts: templates may put them together without anything between.
            return [
                {**self.every.break_value(part), "text": texts.break_text(part["text"])}
                if isinstance(part, Mapping) and isinstance(part.get("text"), str)
                else self.every.break_value(part)
                for part in value
            ]
        return self.every.break_value(value)


def _is_control(token: AddedToken) -> bool:
    name = token.content.replace("▁", " ").strip()
    if len(name) < 2:
        return False
    return token.special or (not _MARKUP.isdisjoint(name) and any(map(str.isalnum, name)))


def _make_marker(added: Iterable[str]) -> str:
    """Of characters that no added token has, so that none is found in a marker."""
    used = set().union(*added)
    chars = [char for char in _MARKER_CHARS if char not in used][:2]
    return "".join(secrets.choice(chars) for _ in range(_MARKER_LENGTH))
