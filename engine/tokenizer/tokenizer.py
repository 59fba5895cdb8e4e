"""`Tokenizer`: text to token ids and back, and the bytes behind each id.

Reads `tokenizer.json` with the `tokenizers` package. transformers would give the same ids, but
importing it takes 5 to 9 s and brings torch along; it is only the way in for other formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import RequestError
from engine.protocol.tokenizer_messages import Conversation
from engine.tokenizer.chat_messages import normalize_message
from engine.tokenizer.chat_renderer import ChatRenderer
from engine.tokenizer.control_tokens import ControlTokens
from engine.tokenizer.encoding import encode_texts
from engine.tokenizer.loading import TokenizerFiles, load_tokenizer_files
from engine.tokenizer.template_variables import check_template_kwargs

__all__ = ["Tokenizer", "check_template_kwargs", "normalize_message"]


class Tokenizer:
    """Token ids and text of one model, equal to what transformers' AutoTokenizer gives.

    `vocab_size` counts added tokens too; the model's own may be larger (padded). Ids that the
    tokenizer doesn't know decode to nothing.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        backend = files.backend
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._special_tokens = files.special_tokens
        self.control = ControlTokens(backend)
        self._chat = ChatRenderer(files.chat_templates, files.special_tokens, self.control)
        if self._chat.has_template:
            self.control.prepare()
        self._decoder = backend.decoder
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.special_ids: frozenset[int] = frozenset(
            id for id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.is_byte_level = isinstance(self._decoder, tokenizers.decoders.ByteLevel)
        """Whether text is the UTF-8 decoding of the tokens' bytes, one after the other."""
        self.byte_ids: frozenset[int] = frozenset(_byte_token_ids(backend))
        """SentencePiece's `<0x..>` tokens, of which several make one character."""
        # Filled on first use: id -> bytes, and by skip_special_tokens: id -> text, for the ids
        # whose bytes are whole characters.
        self._bytes: dict[int, bytes] = {}
        self.whole_texts: tuple[dict[int, str], dict[int, str]] = ({}, {})

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer of a model folder. Raises `ConfigError` if there is none."""
        return cls(load_tokenizer_files(Path(path)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written in the text are parsed as such.

        Raises `RequestError` if the text isn't valid Unicode (a lone surrogate).
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Ids of each text; several threads of `tokenizers` share the texts."""
        return encode_texts(self.backend, texts, add_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text, in UTF-8, possibly a part of a character.

        Special tokens give their name, unknown ids nothing.
        """
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._find_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """As `token_bytes`, decoded; U+FFFD stands for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_visible(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether `decode` hands the token to the decoder at all."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return self.backend.id_to_token(token_id) is not None

    @cached_property
    def plain_id(self) -> int | None:
        """Some token that is text for itself, neither special nor a byte; None if there is none."""
        for token_id in range(self.backend.get_vocab_size()):
            if token_id in self.special_ids or token_id in self.byte_ids:
                continue
            if self.is_visible(token_id, False) and self.decode([token_id]).strip().isalnum():
                return token_id
        return None

    @property
    def has_chat_template(self) -> bool:
        """Whether the model folder has a chat template."""
        return self._chat.has_template

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text of a chat.

        Text parts of a message's content go to a template that reads them; otherwise they are
        joined by newlines. `chat_template` is the name of one of the model's templates, or a
        template (take these only from trusted people, see `ChatTemplate`). `template_kwargs` are
        extra variables; those that the template doesn't read have no effect. Raises `RequestError`
        with the template's message if the template refuses the messages, and for variables that a
        request can't set.
        """
        chat = Conversation(
            messages,
            add_generation_prompt,
            continue_final_message,
            chat_template,
            tools,
            template_kwargs,
        )
        return self.control.unmark(self._chat.render(chat))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt ids of a chat; see `render_chat`. The template writes the bos token itself.

        Control tokens are only those that the template writes. Their names in messages, tools and
        `template_kwargs` are encoded as plain text (see engine/tokenizer/control_tokens.py).
        """
        chat = Conversation(
            messages,
            add_generation_prompt,
            continue_final_message,
            chat_template,
            tools,
            template_kwargs,
        )
        return self.encode_chat(chat)

    def encode_chat(self, chat: Conversation) -> list[int]:
        """Prompt ids of a chat, as `apply_chat_template` gives them."""
        text = self._chat.render(chat)
        try:
            return self.control.encode(text)
        except RequestError as error:
            raise RequestError(error.message, "messages") from error

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _find_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            return _byte_level_bytes(token)
        if token_id in self.byte_ids:
            return bytes.fromhex(token[3:5])
        if self._decoder is None:
            return token.encode()
        # Behind another token, so that a decoder which strips the first space leaves this one.
        text: str = self._decoder.decode(["a", token])
        return text[1:].encode()


def _byte_token_ids(backend: tokenizers.Tokenizer) -> Iterable[int]:
    if "ByteFallback" not in repr(backend.decoder):
        return
    for value in range(256):
        token_id = backend.token_to_id(f"<0x{value:02X}>")
        if token_id is not None:
            yield token_id


def _byte_level_alphabet() -> Mapping[str, int]:
    """GPT-2's mapping: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL_ALPHABET[char] for char in token])
    except KeyError:
        # This is an added token with other characters. The decoder takes it literally; so do we.
        return token.encode()
