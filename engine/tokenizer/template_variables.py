"""`chat_template_kwargs`: the variables of a chat template that a request may set."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.errors import RequestError
from engine.tokenizer.chat_template import FUNCTION_NAMES

RESERVED_TEMPLATE_KEYS = frozenset(
    {
        *("messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt"),
        *("continue_final_message", "return_tensors", "return_dict", "padding", "truncation"),
        "max_length",
    }
)
"""Names of arguments of transformers' own `apply_chat_template`."""
_SPECIAL_TOKEN_NAMES = frozenset(
    {
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
        *("mask_token", "additional_special_tokens", "extra_special_tokens"),
    }
)
_REFUSED = RESERVED_TEMPLATE_KEYS | _SPECIAL_TOKEN_NAMES | FUNCTION_NAMES


def check_template_kwargs(kwargs: Mapping[str, Any], special_tokens: Collection[str] = ()) -> None:
    """Raise `RequestError` for names that a request's variables can't have.

    Those are the arguments of `apply_chat_template`, the special tokens (`special_tokens`: names of
    the model's own), the functions of the template environment, and what isn't an identifier.
    """
    for name in kwargs:
        if name in _REFUSED or name in special_tokens or not name.isidentifier():
            raise RequestError(
                f"chat_template_kwargs must not set {name[:40]!r}.", "chat_template_kwargs"
            )
