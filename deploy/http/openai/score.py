"""`POST /v1/score`: how similar texts are, as vLLM has it."""

# No `from __future__ import annotations`: pydantic reads the annotations of the request.
from typing import Any

import numpy as np
from pydantic import ConfigDict, model_validator

from deploy.http.body import encode_json, refusal
from deploy.http.engine_client import EngineClient
from deploy.http.generation.embedding import EmbeddingGeneration
from deploy.http.generation.endpoint import Endpoint
from deploy.http.generation.generation import Generation
from deploy.http.generation.request import Incoming
from deploy.http.openai.embeddings import PooledFields
from deploy.http.openai.generation import usage
from deploy.http.openai.replies import Scores
from deploy.http.openai.request import Texts
from engine.protocol.pooling import FloatArray

_PAIRS = (("text_1", "text_2"), ("queries", "documents"))
"""Two names of the same."""


class ScoreRequest(PooledFields):
    """Body of `POST /v1/score`. One text is compared with each of the others, or each with the one
    at its place."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": list(pair)} for pair in _PAIRS]}
    )

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    @model_validator(mode="after")
    def _check_pair(self) -> "ScoreRequest":
        given = [name for pair in _PAIRS for name in pair if name in self.model_fields_set]
        pair = self.pair
        for name in pair:
            if name not in given:
                raise refusal(f"You must provide {name}.", name)
        for name in given:
            if name not in pair:
                raise refusal(f"{name} and {pair[0]} exclude each other.", name)
        first, second = self.sides
        if len(first) not in (1, len(second)):
            raise refusal(
                f"{pair[0]} must be one text, or as many as {pair[1]} ({len(second)}), not "
                f"{len(first)}.",
                pair[0],
            )
        return self

    @property
    def pair(self) -> tuple[str, str]:
        """The names of the two fields that are given."""
        old, new = _PAIRS
        return old if self.model_fields_set.isdisjoint(new) else new

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """What is compared with what."""
        first, second = (getattr(self, name) for name in self.pair)
        return first, second


class ScoreEndpoint(Endpoint):
    """Compares texts by the cosine of their embeddings."""

    name = "score"
    paths = ("/v1/score", "/score")
    description = "As vLLM's `POST /v1/score` with an embedding model, with the fields below."
    body = ScoreRequest
    reply = Scores

    async def prepare(
        self,
        client: EngineClient,
        fields: ScoreRequest,
        incoming: Incoming,
    ) -> Generation[Any]:
        request_id = f"score-{fields.request_id or incoming.id}"
        plan, other = [
            await fields.plan(client, self.settings.server, texts, name, request_id, incoming)
            for texts, name in zip(fields.sides, fields.pair, strict=True)
        ]
        plan.sequences += other.sequences
        plan.aborts += other.aborts
        return ScoreReply(client, fields, plan, incoming.tracker)


class ScoreReply(EmbeddingGeneration[ScoreRequest]):
    """One score for each text of the second side."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._embeddings: dict[int, FloatArray] = {}

    def _take(self, index: int, embedding: FloatArray) -> None:
        self._embeddings[index] = embedding

    def _reply(self) -> bytes:
        plan, first = self._plan, len(self._request.sides[0])
        vectors = np.stack([self._embeddings[i] for i in range(len(plan.sequences))])
        wide = vectors.astype(np.float64)
        scores = np.clip((wide[:first] * wide[first:]).sum(axis=1), -1.0, 1.0).tolist()
        body = {
            "id": plan.request.id,
            "object": "list",
            "created": plan.created,
            "model": plan.model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scores)
            ],
            "usage": usage(self._num_prompt, 0, self._num_cached),
        }
        return encode_json(body)
