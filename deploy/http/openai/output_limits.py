"""What a request's output may hold, from the words of the API to what the engine takes."""

from __future__ import annotations

from typing import NamedTuple

from deploy.http.engine_client import EngineClient
from deploy.http.openai.request import GenerationRequest
from deploy.http.openai.structured import check_constraint, constraint_field, constraint_spec
from engine.constraints import ConstraintSpec


class OutputLimits(NamedTuple):
    """Limits of every sequence of a request."""

    bad_words_ids: list[list[int]]
    constraint: ConstraintSpec | None = None


async def output_limits(client: EngineClient, request: GenerationRequest) -> OutputLimits:
    """Tokenize the bad words and check the constraint. Raises `RequestError`."""
    bad_words_ids = await _bad_words_ids(client, request.bad_words)
    return OutputLimits(bad_words_ids, await _constraint(client, request))


async def _constraint(client: EngineClient, request: GenerationRequest) -> ConstraintSpec | None:
    given = (
        request.response_format,
        request.structured_outputs,
        request.guided_json,
        request.guided_regex,
        request.guided_choice,
        request.guided_grammar,
    )
    spec = constraint_spec(*given)
    if spec is not None:
        await check_constraint(client, spec, constraint_field(*given))
    return spec


async def _bad_words_ids(client: EngineClient, words: list[str]) -> list[list[int]]:
    """Token ids of each word, at the beginning of a text and behind a space (as in vLLM)."""
    if not words:
        return []
    stripped = [word.lstrip() for word in words]
    texts = stripped + [f" {word}" for word in stripped]
    found = await client.encode(texts, add_special_tokens=False)
    return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in found if ids)]
