"""From a request to its plan: prompts as token ids, and the parameters of every sequence."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from pydantic import BaseModel

from deploy.http.aborts import Abort
from deploy.http.access.api_key import ApiKey
from deploy.http.engine_client import EngineClient, ModelInfo
from deploy.http.errors import CONTEXT_LENGTH
from deploy.http.generation.reading import OutputReading
from deploy.http.generation.request import (
    ChatRequest,
    FieldNames,
    GenerationRequest,
    Incoming,
    NamedConstraint,
    TextRequest,
    Truncation,
    Wanted,
    named_error,
)
from deploy.http.generation.thinking import behind, thinking_of_chat, thinking_of_text
from deploy.http.parsers.reasoning_format import REASONING_FORMATS, ReasoningFormat
from deploy.http.served_models import no_model
from deploy.options import ServerOptions
from engine.constraints.grammar_payload import Thinking
from engine.errors import ConfigError, RequestError
from engine.protocol.adapters import AdapterRef
from engine.protocol.sampling_params import MODEL_DEFAULTS, SamplingParams, check_prompt
from engine.protocol.sequence import TokenSequence

MAX_TOKEN_CHARS = 256
"""No vocabulary known has longer tokens (Llama 3 and GPT-4 reach 128 spaces)."""
MAX_REPORTED_LOGPROBS = 100_000
"""Log-probabilities of one request: some 20 MB in the ingress."""


_OTHER_FORM = frozenset(
    ("max_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids", "bad_words_ids",
     "constraint", "thinking")
)  # fmt: skip
"""Fields that dialects have in another form: `max_tokens` follows from the prompt's length too, the
rest from several fields. All others are taken under the engine's name where a dialect has it."""
_SAME_NAME = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name not in _OTHER_FORM and name not in MODEL_DEFAULTS
)


@dataclass
class Plan:
    """The sequences of a request: `n` copies of each prompt, prompt by prompt."""

    request: GenerationRequest
    incoming: Incoming
    model: str
    """The served model's name."""
    sequences: list[TokenSequence]
    aborts: list[Abort]
    """Of each sequence: how it is ended early."""
    reading: OutputReading | None
    """None: outputs are text alone."""
    ignored_tools: list[str] = field(default_factory=list)
    """Kinds of tools that the model didn't see."""

    @property
    def n(self) -> int:
        """Copies of each prompt."""
        return self.request.params.n

    @property
    def created(self) -> int:
        """Unix time."""
        return self.incoming.created

    def new_id(self, *parts: object) -> str:
        """24 hex digits that are the same whenever this request is answered; `parts` tell what is
        named so."""
        named = f"{self.incoming.seed} {' '.join(map(str, parts))}"
        return hashlib.sha256(named.encode()).hexdigest()[:24]


class Prompt(NamedTuple):
    """Token ids of one prompt, and how many tokens each of its completions may have."""

    ids: list[int]
    max_tokens: int
    wanted: Wanted
    abort: Abort
    thinking: Thinking | None
    """How its outputs begin to think; None if they don't."""


def sampling_params(
    body: BaseModel, defaults: Mapping[str, float], **translated: Any
) -> SamplingParams:
    """Parameters of the `n` copies of one prompt.

    `defaults` are the model's, by field, for fields that the request leaves out or sets to null.
    `translated` are fields that the dialect has in another form; they count.
    """
    known, given = type(body).model_fields, body.model_fields_set
    chosen: dict[str, Any] = {}
    for name in MODEL_DEFAULTS:
        value = getattr(body, name, None)
        if name in defaults and (value is None or name not in given):
            value = defaults[name]
        if value is not None:
            chosen[name] = value
    chosen |= {name: getattr(body, name) for name in _SAME_NAME if name in known}
    return SamplingParams(**chosen | translated)


async def plan_chat(
    client: EngineClient, server: ServerOptions, request: ChatRequest, incoming: Incoming
) -> Plan:
    """Render the conversation and check everything. Raises `RequestError`; nothing runs yet."""
    info = client.model_info
    if request.chat.chat_template is not None and not server.allow_request_chat_templates:
        raise RequestError(
            "chat_template in requests is switched off on this server: templates are "
            "programs; use the model's own.",
            "chat_template",
        )
    abort = _open_abort(client, request, request.id, incoming.key)
    # The same prompt whenever it is answered.
    chat = msgspec.structs.replace(request.chat, now=incoming.created)
    ids = await client.render_chat(chat)
    check_prompt(ids, info.resolved.model.vocab_size, request.names.prompt)
    if request.compact_above is not None and len(ids) > request.compact_above:
        raise RequestError(
            f"The prompt has {len(ids)} tokens, more than the {request.compact_above} above which "
            "context_management asks for a compaction; the server has none. Compact the "
            "conversation in the client.",
            "context_management",
            code="unsupported_parameter",
        )
    ids = truncate_prompt(ids, request.truncation, request.max_tokens, info)
    max_tokens = resolve_max_tokens(
        len(ids), request.max_tokens, request.default_max_tokens, info, request.names
    )
    form = _reasoning_format(info)
    thinking = None if form is None else await thinking_of_chat(client, request, ids, form)
    constraint = _chat_constraint(request, thinking)
    reading = None
    if thinking is not None or request.tools.format is not None:
        reading = OutputReading(request.tools, thinking, form)
    wanted = Wanted(request.params, request.max_tokens, constraint, request.id)
    prompts = [Prompt(ids, max_tokens, wanted, abort, thinking)]
    plan = await _plan(client, server, request, prompts, reading, incoming)
    plan.ignored_tools = request.tools.ignored
    return plan


async def plan_texts(
    client: EngineClient, server: ServerOptions, request: TextRequest, incoming: Incoming
) -> Plan:
    """Tokenize the prompts and check everything. Raises `RequestError`; nothing runs yet."""
    info = client.model_info
    form = _reasoning_format(info)
    default, each = request.default_max_tokens, request.each
    if not each:
        alike = Wanted(request.params, request.max_tokens, request.constraint, request.id)
        each = [alike] * len(request.prompts)
    aborts = [_open_abort(client, request, wanted.id, incoming.key) for wanted in each]
    prompts = []
    encoded = await _encode(client, request, info)
    given = request.prompts if request.truncation is None else encoded
    for ids, text, wanted, abort in zip(encoded, given, each, aborts, strict=True):
        kept = truncate_prompt(ids, request.truncation, wanted.max_tokens, info)
        max_tokens = resolve_max_tokens(len(kept), wanted.max_tokens, default, info, request.names)
        prompt = kept if isinstance(text, list) else text
        thinking = None if form is None else await thinking_of_text(client, prompt, wanted, form)
        if thinking is not None:
            wanted = wanted._replace(constraint=behind(thinking, wanted.constraint))
        prompts.append(Prompt(kept, max_tokens, wanted, abort, thinking))
    return await _plan(client, server, request, prompts, None, incoming)


def _reasoning_format(info: ModelInfo) -> ReasoningFormat | None:
    return REASONING_FORMATS[info.reasoning_format] if info.reasoning_format else None


async def _adapter(name: str, info: ModelInfo) -> AdapterRef | None:
    """The adapter that a request names, as it is now. Raises `RequestError` if it can't be had."""
    if info.adapters is None or name in ("", info.name):
        return None
    try:
        found = info.adapters.at_hand(name)
        if found is None:  # it may read a large file
            found = await asyncio.to_thread(info.adapters.find, name)
    except ConfigError as error:
        raise RequestError(str(error), "model") from error
    if found is None:  # its folder was removed
        raise no_model(name, info.names)
    return found


def check_text_length(num_chars: int, info: ModelInfo, field: str) -> None:
    """Refuse text that is too long even if all its tokens are the longest, before tokenizing it."""
    most = info.resolved.max_model_len
    if num_chars > most * MAX_TOKEN_CHARS:
        raise RequestError(
            f"This model's maximum context length is {most} tokens. However, your "
            f"{field} has {num_chars} characters. Please reduce the length of the {field}.",
            field,
            code=CONTEXT_LENGTH,
            details=_lengths(f"at least {num_chars // MAX_TOKEN_CHARS + 1}", info),
        )


def truncate_prompt(
    ids: list[int], truncation: Truncation | None, asked: int | None, info: ModelInfo
) -> list[int]:
    """The part of a prompt that is kept: -1 tokens are what leaves room for `asked` tokens of
    output, or, if that is None, for one. Raises `RequestError` if more is to be kept than that."""
    if truncation is None:
        return ids
    keep, side = truncation
    most = info.resolved.max_model_len
    room = most - (1 if asked is None else asked)
    if keep > room:
        less = f" ({most}) less the output" if room < most else ""
        raise RequestError(
            f"truncate_prompt_tokens ({keep}) must not exceed {room}: the context length{less}.",
            "truncate_prompt_tokens",
        )
    if keep < 0:
        keep = max(room, 1)
    return ids[:keep] if side == "right" else ids[-keep:]


def resolve_max_tokens(
    num_prompt: int, asked: int | None, default: int | None, info: ModelInfo, names: FieldNames
) -> int:
    """Output limit of a sequence in tokens: `asked`, 0 if the prompt is only embedded; if it is
    None, `default` or what fits, whichever is less (`default` None: what fits).

    Raises `RequestError` with code context_length_exceeded if the prompt leaves no room, or not
    enough for `asked` tokens.
    """
    most = info.resolved.max_model_len
    room = most - num_prompt
    if room < (asked != 0):
        why = "" if asked == 0 else ", which leaves no room for a completion"
        raise RequestError(
            f"This model's maximum context length is {most} tokens. However, your "
            f"{names.prompt} has {num_prompt} tokens{why}. "
            f"Please reduce the length of the {names.prompt}.",
            names.prompt,
            code=CONTEXT_LENGTH,
            details=_lengths(num_prompt, info),
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise RequestError(
            f"This model's maximum context length is {most} tokens. However, you "
            f"requested {num_prompt + asked} tokens ({num_prompt} in the {names.prompt}, {asked} "
            f"in the completion). Please reduce the length of the {names.prompt} or "
            f"{names.max_tokens}.",
            names.max_tokens,
            code=CONTEXT_LENGTH,
            details=_lengths(num_prompt + asked, info),
        )
    return asked


def _lengths(num_tokens: int | str, info: ModelInfo) -> dict[str, Any]:
    """For the error of a prompt that is too long."""
    return {"num_tokens": num_tokens, "max_model_len": info.resolved.max_model_len}


async def check_constraint(client: EngineClient, constraint: NamedConstraint) -> None:
    """Raise `RequestError`, which names the field, if an engine must not see the constraint."""
    try:
        await client.check_constraint(constraint.spec)
    except RequestError as error:
        raise named_error(error, constraint.field) from None


def _chat_constraint(request: ChatRequest, thinking: Thinking | None) -> NamedConstraint | None:
    """What the tools demand, or else what the request does; behind the reasoning."""
    calls = request.tools.constraint(request.answer_schema)
    constraint = request.constraint
    if calls is not None:
        if constraint is not None and request.answer_schema is None:
            field = constraint.field
            raise RequestError(f"tools and {field} exclude each other.", field)
        constraint = NamedConstraint(calls, "tools")
    return behind(thinking, constraint)


async def _encode(client: EngineClient, request: TextRequest, info: ModelInfo) -> list[list[int]]:
    """Checked token ids of every prompt."""
    field = request.names.prompt
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    prompts = [prompt for prompt in request.prompts if isinstance(prompt, list)]
    if texts:
        if request.truncation is None:
            for text in texts:
                check_text_length(len(text), info, field)
        texts = [_cut(text, request.truncation, info) for text in texts]
        prompts = await client.encode(texts, request.add_special_tokens)
    for ids in prompts:
        check_prompt(ids, info.resolved.model.vocab_size, field)
    return prompts


def _cut(text: str, truncation: Truncation | None, info: ModelInfo) -> str:
    """The part of a text that can matter: what is cut off here would be cut off as tokens."""
    limit = info.resolved.max_model_len * MAX_TOKEN_CHARS
    is_right = truncation is not None and truncation.side == "right"
    return text[:limit] if is_right else text[-limit:]


def _open_abort(
    client: EngineClient, request: GenerationRequest, prompt_id: str, key: ApiKey | None
) -> Abort:
    """What can end the request from now on."""
    ids = frozenset({request.id, request.given_id or request.id, prompt_id})
    abort = Abort(ids, "" if key is None else key.name)
    client.aborts.add(abort)
    return abort


async def until_aborted(abort: Abort, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, unless it is aborted before it is done. Returns whether it was."""
    if abort.is_set:
        work.close()
        return True
    scope = asyncio.timeout(None)
    abort.scopes.add(scope)
    try:
        async with scope:
            await work
    except TimeoutError:
        if not scope.expired():  # one of the work's own
            raise
        return True
    finally:
        abort.scopes.discard(scope)
    return False


def _within_limits(
    prompts: list[Prompt], names: FieldNames, server: ServerOptions
) -> Iterator[Prompt]:
    """The prompts. Where no number of output tokens was asked for, it is reduced to what may have
    log-probabilities. Raises `RequestError` if the request is too large."""
    num_sequences = sum(prompt.wanted.params.n for prompt in prompts)
    tokens = reported = 0
    for prompt in prompts:
        n, num_prompt = prompt.wanted.params.n, len(prompt.ids)
        of_prompt, of_output = _reported_logprobs(prompt.wanted.params)
        if of_output and prompt.wanted.max_tokens is None:
            fitting = (MAX_REPORTED_LOGPROBS // num_sequences - num_prompt * of_prompt) // of_output
            prompt = prompt._replace(max_tokens=max(1, min(prompt.max_tokens, fitting)))
        tokens += n * (num_prompt + prompt.max_tokens)
        reported += n * (num_prompt * of_prompt + prompt.max_tokens * of_output)
        yield prompt
    for count, limit, what in (
        (tokens, server.max_request_tokens, "tokens, prompts and outputs of all its sequences"),
        (reported, MAX_REPORTED_LOGPROBS, "log-probabilities to report"),
    ):
        if count > limit:
            raise RequestError(
                f"The request has up to {count} {what}; at most {limit} are allowed. Please "
                f"reduce {names.max_tokens}, the number of choices or of prompts, or what is "
                "reported.",
                names.max_tokens,
                code="request_too_large",
            )


def _reported_logprobs(params: SamplingParams) -> tuple[int, int]:
    """Log-probabilities that are reported of each token of the prompt, and of the output."""
    listed = 0 if params.logprob_token_ids is None else len(params.logprob_token_ids)
    of_prompt = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
    of_output = 0 if params.logprobs is None else params.logprobs + listed + 1
    return of_prompt, of_output


async def _plan(
    client: EngineClient,
    server: ServerOptions,
    request: GenerationRequest,
    prompts: list[Prompt],
    reading: OutputReading | None,
    incoming: Incoming,
) -> Plan:
    """Checked sampling parameters for every sequence.

    Each sequence gets a seed, one drawn from the incoming request's if the body has none, so that
    it can be resumed elsewhere with the same noise.
    """
    info, key = client.model_info, incoming.key
    draws = random.Random(incoming.seed)
    priority, namespace, limits = request.priority, request.cache_salt, None
    if key is not None:
        priority = key.priority(request.priority)
        namespace, limits = key.namespace(request.cache_salt), key.limits
    adapter = await _adapter(request.model, info)
    if adapter is not None:
        namespace = adapter.namespace(namespace)
    bad_words_ids = await _bad_words_ids(client, request.bad_words)
    prediction_ids: np.ndarray | None = None
    if request.prediction and info.resolved.engine.speculative_config is not None:
        found = await client.encode([request.prediction], add_special_tokens=False)
        if found[0]:
            prediction_ids = np.asarray(found[0][: info.resolved.max_model_len], np.int32)
    checked: NamedConstraint | None = None
    verified: SamplingParams | None = None
    sequences: list[TokenSequence] = []
    aborts: list[Abort] = []
    for prompt in list(_within_limits(prompts, request.names, server)):
        params, constraint = prompt.wanted.params, prompt.wanted.constraint
        if prompt.thinking is not None:
            params = msgspec.structs.replace(params, thinking=prompt.thinking)
        params.bad_words_ids = bad_words_ids
        if constraint is not None:
            if constraint != checked and not await until_aborted(
                prompt.abort, check_constraint(client, constraint)
            ):
                checked = constraint
            params.constraint = msgspec.structs.replace(constraint.spec, field=constraint.field)
        if reading is not None:
            # Some models write the marks of calls and reasoning as special tokens.
            params.skip_special_tokens = False
        is_new = params is not verified or prompt.max_tokens != params.max_tokens
        if is_new and request.pooling is None:
            params.max_tokens = prompt.max_tokens
            params.verify(info.resolved.model.vocab_size)
            verified = params
        ids = np.asarray(prompt.ids, np.int32)
        for copy in params.copies(partial(draws.getrandbits, 63)):
            aborts.append(prompt.abort)
            sequences.append(
                TokenSequence(
                    ids,
                    copy,
                    request.id,
                    priority,
                    namespace,
                    limits,
                    request.pooling,
                    prediction_ids,
                    adapter,
                    request.delivery.token_ids,
                    request.is_flex or incoming.is_flex,
                )
            )
    if len(sequences) > 1:
        for index, sequence in enumerate(sequences):
            sequence.request_id = f"{request.id}-{index}"
    name = info.name if adapter is None else adapter.name
    return Plan(request, incoming, name, sequences, aborts, reading)


async def _bad_words_ids(client: EngineClient, words: list[str]) -> list[list[int]]:
    """Token ids of each word, at the beginning of a text and behind a space (as in vLLM)."""
    if not words:
        return []
    stripped = [word.lstrip() for word in words]
    texts = stripped + [f" {word}" for word in stripped]
    found = await client.encode(texts, add_special_tokens=False)
    return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in found if ids)]
