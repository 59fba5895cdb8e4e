"""`RecordStore`: keeps requests, so that they can be answered again. `Record`: one of them.

The tokens of an answer are a function of its request: whoever has the record makes the same answer.
It is written before the first token. Tokens that were made are written beside it now and then, so
that they needn't be made again, and responses that later requests go on from once they have ended.
Records hold prompts and answers (docs/security.md).
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from deploy.http.body import encode_json
from engine.errors import RequestError

logger = logging.getLogger(__name__)

MAX_ID = 256
"""Characters of a record's id."""
MAX_CHAIN = 2048
"""Responses that a conversation may have."""
MAX_CHAIN_BYTES = 32 << 20
"""Of all that its records hold."""
AWAY_S = 2.0
"""For this time, who can do without a store that failed doesn't try it again."""
LEASE_S = 15.0
"""Who makes an answer that must be there in the end renews its lease within this time, or another
process makes it."""


class Record(msgspec.Struct, kw_only=True):
    """A request, and its response as the API shows it, where that is kept, too."""

    id: str
    owner: str
    """Name of the API key that may see it; "" if the server has none."""
    endpoint: str
    """Name of the endpoint that it came to."""
    request_id: str
    seed: int
    """0 to 2^128 - 1; this and `created`: see `Incoming`."""
    created: int
    digest: str
    """Of model and configuration: with others the answer is another one."""
    adapter: str = ""
    """The digest of its adapter."""
    body: bytes
    previous: str | None = None
    """The response that it goes on from."""
    response: dict[str, Any] | None = None
    is_background: bool = False
    """Whether the answer is made though nobody reads it."""
    has_ended: bool = False

    @property
    def is_response(self) -> bool:
        """Whether it is one of `POST /v1/responses`, whose ids are the server's."""
        return self.endpoint == "responses"


class Head(msgspec.Struct, array_like=True, kw_only=True):
    """The fields of a record that stores only keep."""

    endpoint: str
    request_id: str
    seed: str
    """32 hex digits."""
    created: int
    digest: str
    adapter: str
    is_background: bool

    @classmethod
    def of(cls, record: Record) -> Head:
        """A record's."""
        return cls(
            endpoint=record.endpoint,
            request_id=record.request_id,
            seed=f"{record.seed:032x}",
            created=record.created,
            digest=record.digest,
            adapter=record.adapter,
            is_background=record.is_background,
        )

    def record(self, **others: Any) -> Record:
        """The record; `others` are its other fields."""
        return Record(
            endpoint=self.endpoint,
            request_id=self.request_id,
            seed=int(self.seed, 16),
            created=self.created,
            digest=self.digest,
            adapter=self.adapter,
            is_background=self.is_background,
            **others,
        )


class RecordStore(ABC):
    """Its methods raise `RequestError`: 404 for a record that isn't there or is another key's, 503
    if the store can't be used."""

    kind: ClassVar[str]
    """The option's word for it."""

    def __init__(
        self, max_age_s: float, max_bytes: int, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        """Records older than `max_age_s` are removed, and the oldest while all are larger than
        `max_bytes`. `on_failure` is called whenever the store can't be used."""
        self._max_age_s, self._max_bytes = max_age_s, max_bytes
        self._on_failure = on_failure
        self._holder = ""
        """Of leases: this process, once it uses the store."""
        self._held: set[tuple[str, str]] = set()
        """Owners and ids of records whose answers this process makes. Their leases are renewed, and
        no others: what it has given up is taken up, also if the store couldn't be told."""
        self._away_until = 0.0
        self._answered_at = 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since it did anything that it was asked for here."""
        return time.monotonic() - self._answered_at

    @property
    def is_away(self) -> bool:
        """Whether it couldn't be used a moment ago. Who can do without it doesn't try then."""
        return time.monotonic() < self._away_until

    def note_away(self) -> None:
        """It couldn't be used, or not in time."""
        self._away_until = time.monotonic() + AWAY_S

    def _note_answer(self) -> None:
        self._answered_at = time.monotonic()

    @abstractmethod
    async def add(self, record: Record, age_s: float | None = None, *, lease: bool = False) -> None:
        """Keep a record; one of the same id makes way. It is removed after `age_s` (None: as long
        as the store keeps any). `lease`: this process makes its answer, or else another one. 413 if
        it is too large."""

    @abstractmethod
    async def end(
        self, record: Record, response: dict[str, Any] | None = None, age_s: float | None = None
    ) -> None:
        """Its answer is complete. Nothing happens if that was said before, or it was deleted."""

    @abstractmethod
    async def leave(
        self,
        record: Record,
        response: dict[str, Any] | None = None,
        age_s: float | None = None,
        *,
        again_in_s: float | None = None,
        is_reader: bool = False,
    ) -> None:
        """This process goes on no longer. Some process takes it up after `again_in_s`; None: it
        waits for a reader. `is_reader`: another process may go on with it, so that it is removed no
        sooner than without this."""

    async def progress(self, record: Record, response: dict[str, Any]) -> bool:
        """Keep the response so far of a record whose lease this process has. False if it has it no
        longer, or the record has ended or was deleted: then nothing is kept, nor renewed."""
        named = record.owner, record.id
        changed = encode_json(response)
        if named in self._held and await self._respond(record, changed, has_ended=False):
            return True
        self._held.discard(named)
        return False

    async def amend(self, record: Record, response: dict[str, Any]) -> None:
        """Keep another response of a record that has ended."""
        if not await self._respond(record, encode_json(response), has_ended=True):
            raise no_record(record.id)

    @abstractmethod
    async def _respond(self, record: Record, response: bytes, *, has_ended: bool) -> bool:
        """Change the response of a record that has ended, or hasn't and whose lease this process
        has. False if there is no such record."""

    @abstractmethod
    async def add_tokens(
        self, news: Sequence[tuple[Record, bytes]], age_s: float | None = None
    ) -> None:
        """Keep more of what is known of the tokens of records: pieces of `AnswerTokens`. They are
        removed no sooner than after `age_s`. Nothing happens to a record that isn't there."""

    @abstractmethod
    async def tokens_of(self, record: Record) -> bytes:
        """All pieces of a record; empty if there are none."""

    @abstractmethod
    async def forget(self, record: Record) -> None:
        """Remove this record, and no later one of the same id."""

    @abstractmethod
    async def take_up(self, digests: Sequence[str]) -> list[Record]:
        """Renew the leases of this process, and take over the records whose lease has ended, of
        models that are served here: their `ModelInfo.digest`. Expired records are removed."""

    @abstractmethod
    async def num_leased(self) -> tuple[int, int]:
        """Of the answers that must be there in the end: how many are made now, or will be tried
        again soon, and how many wait for a process."""

    async def get(self, record_id: str, owner: str) -> Record:
        """The record of this id."""
        return await self._get(record_id, owner, "response_id")

    async def find(self, record_id: str, owner: str, endpoint: str) -> Record:
        """The record of this id, with its tag or without, of a request that came to `endpoint`."""
        if len(record_id) > MAX_ID:
            raise no_record(record_id)
        try:
            record = await self.get(record_id, owner)
        except RequestError as error:
            name, tag, _ = record_id.rpartition("~")
            if error.status != 404 or not tag:
                raise
            record = await self.get(name, owner)
            if tagged(record) != record_id:
                raise no_record(record_id) from None
        if record.endpoint != endpoint:
            raise no_record(record_id)
        return record

    @abstractmethod
    async def page(
        self,
        owner: str,
        endpoint: str,
        *,
        after: str | None,
        limit: int,
        newest_first: bool = True,
    ) -> list[Record]:
        """The records of this key and endpoint that have a response, in the order of their being
        added, from behind the one whose id is `after`."""

    @abstractmethod
    async def delete(self, record_id: str, owner: str) -> None:
        """Forget a record."""

    @abstractmethod
    async def _get(self, record_id: str, owner: str, field: str) -> Record:
        """As `get`; `field`: where the request names it."""

    async def conversation(self, record_id: str, owner: str) -> list[Record]:
        """The record and those that it goes on from, the first one first. 404 if one isn't there
        any more, 400 if there are too many."""
        found: list[Record] = []
        wanted: str | None = record_id
        size = 0
        while wanted is not None:
            record = await self._get(wanted, owner, "previous_response_id")
            if not record.is_response:
                raise no_record(wanted, "previous_response_id")
            size += len(record.body) + len(encoded(record.response) or b"")
            if len(found) == MAX_CHAIN or size > MAX_CHAIN_BYTES:
                raise RequestError(
                    f"The conversation has more than {MAX_CHAIN} responses, or "
                    f"{MAX_CHAIN_BYTES >> 20} MiB.",
                    "previous_response_id",
                )
            found.append(record)
            wanted = record.previous
        return found[::-1]

    @abstractmethod
    async def close(self) -> None:
        """Wait until everything is kept."""

    def _expiry(self, age_s: float | None) -> float:
        """Unix time at which a record is removed that may have this age from now on; None: as long
        as the store keeps any."""
        return time.time() + min(age_s or self._max_age_s, self._max_age_s)

    def _check_size(self, record: Record) -> None:
        """Raise `RequestError` if a record is too large."""
        if len(record.body) + len(encoded(record.response) or b"") > self._max_bytes // 4:
            raise RequestError(
                "The request is too large to be kept; ask with store: false.", status=413
            )

    def _failed(self, place: object, error: Exception) -> RequestError:
        """What is said of a store that can't be read or written."""
        logger.error("records can't be kept in %s: %s", place, error)
        self.note_away()
        self._on_failure()
        return RequestError(
            "Requests can't be stored at present; ask with store: false.",
            status=503,
            code="store_unavailable",
        )


def tagged(record: Record) -> str:
    """The record's id, with a tag that tells it from a later one of the same id: clients choose the
    ids of their requests."""
    return record.id if record.is_response else f"{record.id}~{record.seed:032x}"[:-24]


def encoded(response: dict[str, Any] | None) -> bytes | None:
    """A response as JSON."""
    return None if response is None else encode_json(response)


def no_record(record_id: str, field: str = "response_id") -> RequestError:
    """Nobody learns whether a record is another key's."""
    message = f"Response with id '{record_id[:100]}' not found."
    return RequestError(message, field, status=404, code="response_not_found")
