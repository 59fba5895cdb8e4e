"""Messages between an ingress and its tokenizer. `call` pairs a reply with its request."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.sampling_params import SamplingParams
from engine.tokenizer.detokenizer_manager import TextDelta


class EncodeRequest(msgspec.Struct, array_like=True):
    """Texts to token ids; answered by `EncodeReply`."""

    call: int
    reply_to: str
    texts: list[str]
    add_special_tokens: bool = True


class ChatRequest(msgspec.Struct, array_like=True):
    """A conversation to token ids (one list in `EncodeReply.ids`)."""

    call: int
    reply_to: str
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None


class EncodeReply(msgspec.Struct, array_like=True):
    """Token ids, or why there are none (`error` not empty; `param`: the field at fault)."""

    call: int
    ids: list[list[int]]
    error: str = ""
    param: str | None = None


class DecodeRequest(msgspec.Struct, array_like=True):
    """Token ids to text, special tokens included."""

    call: int
    reply_to: str
    token_ids: list[int]


class DecodeReply(msgspec.Struct, array_like=True):
    """The text of a `DecodeRequest`, or why there is none."""

    call: int
    text: str
    error: str = ""


class Register(msgspec.Struct, array_like=True):
    """A request is about to start: detokenize `rid` for `reply_to`; answered by `Registered`."""

    call: int
    reply_to: str
    rid: int
    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    return_token_ids: bool = False


class Registered(msgspec.Struct, array_like=True):
    """The tokenizer knows the request, or why it can't (`error` not empty)."""

    call: int
    error: str = ""


class Unregister(msgspec.Struct, array_like=True):
    """Nobody reads `rid` any more."""

    rid: int


class TextOutputs(msgspec.Struct, array_like=True):
    """What a step gave to one ingress: one message whatever the number of streams."""

    deltas: list[TextDelta]
