"""Texts to token ids with the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from engine.errors import RequestError


def encode_texts(
    backend: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool
) -> list[list[int]]:
    """Ids of each text; several threads of `tokenizers` share the texts.

    Raises `RequestError` if a text isn't valid Unicode (a lone surrogate).
    """
    try:
        # "fast" leaves out the character offsets, which nobody reads here.
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    except TypeError as error:
        if not any(_has_surrogate(text) for text in texts):
            raise
        raise RequestError(
            "the text isn't valid Unicode: it holds half of a surrogate pair"
        ) from error
    return [encoding.ids for encoding in encodings]


def _has_surrogate(text: str) -> bool:
    return isinstance(text, str) and any("\ud800" <= char <= "\udfff" for char in text)
