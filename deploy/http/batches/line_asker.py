"""`LineAsker`: has the endpoints of this process answer the lines of a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from deploy.http.access.api_key import ApiKey
from deploy.http.batches.lines import BatchLine
from deploy.http.batches.output import Answer, answered, unanswered
from deploy.http.generation.endpoint import Again, Endpoint
from deploy.http.generation.unattended import Unattended, answer_of
from deploy.http.records.store import Record
from engine.errors import RequestError

NO_MODEL = b'"model_not_found"'
"""In the body of an error: its code."""


class StopBatch(RequestError):
    """The batch can't go on here and now. Its message says why."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503)


class LineAsker:
    """Of one batch. Whatever a line is told follows from the batch's file and the line's number."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        digest: str,
        made_at: int,
        source_digest: str,
        owner: str = "",
    ) -> None:
        """`endpoints`: by path. `digest`: of the model that is to answer. `made_at`: Unix time that
        the answers bear. `source_digest`: of the file that the lines are from. `owner`: as in
        `Record`."""
        self._endpoints = endpoints
        self._digest = digest
        self._made_at = made_at
        self._source_digest = source_digest
        self._owner = owner
        self.key: ApiKey | None = None
        """The owner's, as it is now; None if the server has none."""

    async def ask(self, line: BatchLine) -> Unattended:
        """What the line's endpoint answers. Raises `StopBatch` if another model is served."""
        endpoint, seed = self._endpoints[line.url], self._seed(line)
        record = Record(
            id=seed,
            owner=self._owner,
            endpoint=endpoint.name,
            request_id=seed,
            seed=int(seed, 16),
            created=self._made_at,
            digest=self._digest,
            body=line.body,
        )
        reply = await answer_of(endpoint, Again(record, is_stream=False, is_line=True), self.key)
        if reply.status == 409:
            raise StopBatch("another model or configuration is served than the batch began with")
        if reply.status == 404 and NO_MODEL in reply.body:
            raise StopBatch("its model isn't served")
        return reply

    def answer(self, line: BatchLine, reply: Unattended) -> Answer:
        """What the output has of a line that was asked."""
        seed = self._seed(line)
        return answered(line.number, _name(seed), line.custom_id, reply.status, seed, reply.body)

    def no_answer(self, line: BatchLine, code: str, message: str) -> Answer:
        """What the output has of a line that wasn't asked."""
        return unanswered(line.number, _name(self._seed(line)), line.custom_id, code, message)

    def _seed(self, line: BatchLine) -> str:
        """32 hex digits."""
        return hashlib.sha256(f"{self._source_digest} {line.number}".encode()).hexdigest()[:32]


def _name(seed: str) -> str:
    """Of a line's answer."""
    return f"batch_req_{seed}"
