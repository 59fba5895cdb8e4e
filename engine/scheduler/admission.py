"""Turning an `AddRequest` into a `Req`, or refusing it with a reason."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from engine.constraints import AllOf, Constraint, TokenFilter, create_constraint
from engine.constraints.grammar_compiler import GrammarCompiler
from engine.errors import RequestError
from engine.protocol.messages import AddRequest, FinishedReq
from engine.protocol.pooling import Pooling
from engine.protocol.sampling_params import SamplingParams, check_prompt, check_token_ids
from engine.protocol.sequence import KeyLimits
from engine.protocol.step import Int64Array, IntArray
from engine.scheduler.key_shares import KeyShares
from engine.scheduler.req import Req
from engine.scheduler.scheduler_config import SchedulerConfig

_NOTHING_SAMPLED = SamplingParams(temperature=0.0)


def make_req(
    request: AddRequest,
    config: SchedulerConfig,
    shares: KeyShares,
    now: float,
    grammars: GrammarCompiler | None = None,
) -> Req | FinishedReq:
    """A queued `Req`, or the `FinishedReq` that refuses it, or ends it if it was resumed complete.

    `now` is in seconds of the loop's clock; `shares` has what waits already. `grammars` is None if
    the model has no tokenizer.
    """
    sequence = request.sequence
    if sequence.pooling is not None:
        sequence = msgspec.structs.replace(sequence, params=_NOTHING_SAMPLED)
    params, prompt_len = sequence.params, len(sequence.prompt_ids)
    resumed = request.output_ids if request.output_ids is not None else np.zeros(0, np.int32)
    try:
        _verify(request, config, shares)
        constraint = _make_constraint(params, config, resumed.tolist(), grammars)
    except RequestError as error:
        return FinishedReq(
            request.rid,
            "error",
            prompt_len,
            len(resumed),
            0,
            message=error.message,
            status=error.status,
            param=error.param,
        )
    limit = config.max_model_len - prompt_len if sequence.pooling is None else 0
    max_new = limit if params.max_tokens is None else min(params.max_tokens, limit)
    if constraint is not None and constraint.is_terminated:
        return FinishedReq(request.rid, "stop", prompt_len, len(resumed), 0)
    if len(resumed) >= max_new and sequence.pooling is None:
        return FinishedReq(request.rid, "length", prompt_len, len(resumed), 0)
    stop_ids = frozenset(() if params.ignore_eos else config.resolved.model.eos_token_ids)
    if params.thinking is None:  # otherwise whoever makes the text knows where the answer begins
        stop_ids |= frozenset(params.stop_token_ids)
    timeout, queue_timeout = config.engine.request_timeout_s, config.engine.queue_timeout_s
    return Req(
        request.rid,
        request.reply_to,
        sequence,
        max_new,
        stop_ids,
        page_hashes=[] if request.page_hashes is None else request.page_hashes.tolist(),
        arrival=now,
        deadline=None if timeout is None else now + timeout,
        queue_deadline=None if queue_timeout is None else now + queue_timeout,
        constraint=constraint,
        output_ids=resumed.tolist(),
    )


def verify_prompt(
    ids: IntArray | Int64Array,
    max_model_len: int,
    vocab_size: int,
    pooling: Pooling | None = None,
) -> None:
    """Raise `RequestError` if a prompt [n] is empty, too long, or not of this vocabulary.

    Only a prompt that is pooled may take the whole context.
    """
    if pooling is not None and len(ids) > max_model_len:
        raise RequestError(
            f"the prompt has {len(ids)} tokens; the context length is {max_model_len}",
            "prompt",
            code="context_length_exceeded",
        )
    if pooling is None and len(ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(ids)} tokens; with at least one token of output it must stay "
            f"below the context length of {max_model_len}",
            "prompt",
            code="context_length_exceeded",
        )
    check_prompt(ids, vocab_size, "prompt")


def _make_constraint(
    params: SamplingParams,
    config: SchedulerConfig,
    resumed: Sequence[int],
    grammars: GrammarCompiler | None,
) -> Constraint | None:
    """The request's constraint after the `resumed` output. Raises `RequestError`."""
    parts: list[Constraint] = []
    if params.constraint is not None:
        eos = () if params.ignore_eos else config.resolved.model.eos_token_ids
        made = create_constraint(params.constraint, config.vocab_size, eos, grammars)
        parts.append(made)
    if params.allowed_token_ids is not None or params.bad_words_ids:
        parts.append(TokenFilter(config.vocab_size, params.allowed_token_ids, params.bad_words_ids))
    if not parts:
        return None
    constraint = parts[0] if len(parts) == 1 else AllOf(parts, config.vocab_size)
    if not all(constraint.accept(token) for token in resumed):
        raise RequestError("the resumed output doesn't follow the constraint", "constraint")
    return constraint


def _verify(request: AddRequest, config: SchedulerConfig, shares: KeyShares) -> None:
    sequence, params = request.sequence, request.sequence.params
    if sequence.pooling is not None:
        params = _NOTHING_SAMPLED
    verify_prompt(sequence.prompt_ids, config.max_model_len, config.vocab_size, sequence.pooling)
    params.verify(config.vocab_size)
    if sequence.prediction_ids is not None:
        check_token_ids("prediction", sequence.prediction_ids, config.vocab_size)
    if params.seed is None and params.temperature > 0:
        raise RequestError("a sampled request needs a seed (the ingress draws one)", "seed")
    places = config.engine.max_queued_requests
    if shares.num_waiting >= places and not _has_place(sequence.key, places, shares):
        raise RequestError(
            f"the queue is full ({shares.num_waiting} requests wait); try again later", status=429
        )
    if sequence.key is not None and request.output_ids is None:
        _check_queued_tokens(len(sequence.prompt_ids), sequence.key, shares)


def _has_place(key: KeyLimits | None, places: int, shares: KeyShares) -> bool:
    """Whether a request of a key may wait though the queue is full: others must not fill it to the
    end, so each key has its part of the places."""
    if key is None:
        return False
    share = shares.get(key)
    own = 0 if share is None else len(share.waiting)
    others = shares.num_waiting_keys(besides=key)
    return others > 0 and own < places // (1 + others)


def _check_queued_tokens(num_prompt: int, key: KeyLimits, shares: KeyShares) -> None:
    limit = key.max_queued_tokens
    if limit is None:
        return
    if num_prompt > limit:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; requests of the key {key.name} may have at most "
            f"{limit} waiting (max_queued_tokens)",
            "prompt",
        )
    share = shares.get(key)
    waiting = 0 if share is None else share.waiting_tokens
    if waiting + num_prompt > limit:
        raise RequestError(
            f"{waiting} prompt tokens of the key {key.name} wait, and at most {limit} may; try "
            "again later",
            status=429,
        )
