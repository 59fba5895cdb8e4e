"""`EmbeddingGeneration`: prompts that are embedded, of whose vectors an API makes a reply."""

from __future__ import annotations

from abc import abstractmethod
from typing import NoReturn

from deploy.http.engine_client import EngineClient
from deploy.http.generation.generation import F, Generation
from deploy.http.generation.plan import Plan
from deploy.http.metrics import RequestTracker
from engine.errors import RequestError
from engine.protocol.pooling import FloatArray, read_embedding
from engine.protocol.tokenizer_messages import TextDelta


class EmbeddingGeneration(Generation[F]):
    """Runs a plan whose requests are pooled. There is no stream."""

    def __init__(
        self,
        client: EngineClient,
        fields: F,
        plan: Plan,
        tracker: RequestTracker,
        dimensions: int | None = None,
        *,
        normalize: bool = True,
    ) -> None:
        """`dimensions` and `normalize`: see `engine.protocol.pooling.read_embedding`."""
        super().__init__(client, fields, plan, tracker)
        self._dimensions = dimensions
        self._normalize = normalize

    def _note(self, index: int, delta: TextDelta) -> None:
        super()._note(index, delta)
        if delta.embedding is None:
            raise RequestError("The request was aborted.", code="request_aborted")
        self._take(
            index, read_embedding(delta.embedding, self._dimensions, normalize=self._normalize)
        )

    @abstractmethod
    def _take(self, index: int, embedding: FloatArray) -> None:
        """The embedding of prompt `index` has come."""

    def _opening(self) -> NoReturn:
        raise TypeError("embeddings are no stream")

    def _events(self, index: int, delta: TextDelta) -> NoReturn:
        raise TypeError("embeddings are no stream")

    def _ending(self) -> NoReturn:
        raise TypeError("embeddings are no stream")
