"""What a request's output may hold, from the words of the API to what the engine takes."""

from __future__ import annotations

from typing import NamedTuple

from deploy.http.engine_client import EngineClient
from deploy.http.openai.request import GenerationRequest
from deploy.http.openai.structured import check_constraint, constraint_field, constraint_spec
from engine.constraints import ConstraintSpec, structured
from engine.constraints.grammar_payload import Thinking
from engine.errors import RequestError


class OutputLimits(NamedTuple):
    """Limits of every sequence of a request."""

    bad_words_ids: list[list[int]]
    constraint: ConstraintSpec | None = None


async def output_limits(
    client: EngineClient,
    request: GenerationRequest,
    calls: ConstraintSpec | None = None,
    thinking: Thinking | None = None,
) -> OutputLimits:
    """Tokenize the bad words and check the constraint. Raises `RequestError`.

    `calls`: what the request's tools demand, which includes its `response_format`. `thinking`: the
    constraint begins behind it.
    """
    bad_words_ids = await _bad_words_ids(client, request.bad_words)
    given = (
        None if calls is not None else request.response_format,
        request.structured_outputs,
        request.guided_json,
        request.guided_regex,
        request.guided_choice,
        request.guided_grammar,
    )
    spec, field = constraint_spec(*given), constraint_field(*given)
    if calls is not None:
        if spec is not None:
            raise RequestError(f"tools and {field} exclude each other.", field)
        spec, field = calls, "tools"
    if spec is not None:
        if thinking is not None:
            spec = structured.after_thinking(spec, thinking)
        await check_constraint(client, spec, field)
    return OutputLimits(bad_words_ids, spec)


async def _bad_words_ids(client: EngineClient, words: list[str]) -> list[list[int]]:
    """Token ids of each word, at the beginning of a text and behind a space (as in vLLM)."""
    if not words:
        return []
    stripped = [word.lstrip() for word in words]
    texts = stripped + [f" {word}" for word in stripped]
    found = await client.encode(texts, add_special_tokens=False)
    return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in found if ids)]
