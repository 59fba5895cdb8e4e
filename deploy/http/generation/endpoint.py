"""`Endpoint`: one generating route, from an HTTP request to the last byte of its answer.

The answer ends when its client leaves, or a while later (`on_disconnect`). uvicorn reports a
disconnect through `receive`; Ray Serve cancels the request's task. In both cases every engine
stream of an answer that ends is closed before the response returns.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from abc import abstractmethod
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deploy.http.access.api_key import ApiKey, owner_of
from deploy.http.body import M, parse_body
from deploy.http.dialect import Route, RouteParts
from deploy.http.engine_client import EngineClient, ModelInfo
from deploy.http.errors import ErrorReply, failure_of
from deploy.http.generation.event_numbers import LAST_EVENT_ID, EventNumbers, Place, read_last
from deploy.http.generation.event_stream import EventStream
from deploy.http.generation.generation import Generation
from deploy.http.generation.request import Incoming
from deploy.http.metrics import RequestTracker
from deploy.http.records.keeper import Keeper
from deploy.http.records.store import Record, tagged
from deploy.http.records.token_log import AnswerTokens, read_tokens
from deploy.options import ServerOptions
from engine.errors import RequestError

if TYPE_CHECKING:  # needs OpenTelemetry's packages, which an install may lack
    from deploy.http.tracing.request_trace import RequestTrace

logger = logging.getLogger(__name__)

MAX_KEPT = 64
"""Sequences of a request that is kept: each event says the place in all of them."""
ON_DISCONNECT = "X-On-Disconnect"
"""A header: what becomes of the request when its client leaves, if it isn't the server's option."""
CLIENT_GONE = 499
"""Status of requests whose client left (nginx's number; nobody receives it)."""


def check_content_type(headers: Headers) -> None:
    """Raise `RequestError` (415) unless `content-type` says that the body is JSON.

    Browsers let any web page send some types to any server without asking the server first
    (text/plain, forms, no type at all). These are refused: otherwise a page could make a server on
    the reader's own machine compute.
    """
    given = headers.get("content-type", "")
    media_type = given.partition(";")[0].strip().lower()
    if media_type == "application/json" or re.fullmatch(r"application/[\w.-]+\+json", media_type):
        return
    named = f"not {given[:100]!a}" if given else "and the request has no Content-Type"
    raise RequestError(
        f"The body must be application/json, {named}.", status=415, code="unsupported_media_type"
    )


def check_same_site(headers: Headers) -> None:
    """Raise `RequestError` (403) if a browser says that a page of another site sent the request."""
    if headers.get("sec-fetch-site", "") == "cross-site":
        raise RequestError("Pages of other sites may not do this.", status=403)


async def read_body(request: Request, server: ServerOptions) -> bytes:
    """The request body. Raises `RequestError` if it is too long (413) or doesn't come in time
    (408), and `ClientDisconnect`."""
    limit = server.max_body_bytes
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(server.body_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
    except TimeoutError:
        message = f"The request body didn't come within {server.body_timeout_s:g} s."
        raise RequestError(message, status=408, code="request_timeout") from None
    return b"".join(chunks)


async def read_given(request: Request, server: ServerOptions, kind: type[M]) -> M:
    """A request's body, which is JSON, checked. Raises `RequestError` and `ClientDisconnect`."""
    check_content_type(request.headers)
    return await parse_body(await read_body(request, server), kind)


def _too_large(limit: int) -> RequestError:
    message = f"The request body is larger than {limit} bytes."
    return RequestError(message, status=413, code="request_too_large")


class Endpoint(Route):
    """One generating route. Subclasses know its fields."""

    name: ClassVar[str]
    """The endpoint's label in metrics."""
    body: ClassVar[type[BaseModel]]
    errors = (400, 404, 408, 413, 415, 429, 500, 503)
    names_events: ClassVar[bool] = False
    """Whether the events of its streams have names, so that all clients read their fields."""

    def __init__(self, parts: RouteParts) -> None:
        super().__init__(parts)
        self.metrics.add_endpoint(self.name)

    async def handle(self, request: Request) -> Response:
        """The HTTP handler. The response that it returns reads the body and answers. A client that
        sends its request once more with `Last-Event-ID` reads a stream on."""
        last = request.headers.get(LAST_EVENT_ID, "")
        if not last or self.store is None:
            return GenerationResponse(self)
        check_content_type(request.headers)
        await read_body(request, self.settings.server)
        owner = owner_of(request.scope["state"].get("key"))
        record = await self.store.find(last.rpartition(":")[0], owner, self.name)
        return self.again(record, read_last(last, record))

    def again(self, record: Record, place: Place | None, *, is_stream: bool = True) -> Response:
        """The answer to a request that is kept, for a client that comes back."""
        self.metrics.read_on(self.name)
        return GenerationResponse(self, Again(record, is_stream, place))

    def model_named(self, given: Any) -> str:
        """The name of the model in a request, whose type is `body`; "" if it names none."""
        return str(given.model)

    @abstractmethod
    async def prepare(
        self, client: EngineClient, given: Any, incoming: Incoming
    ) -> Generation[Any]:
        """Check the request `given`, whose type is `body`, tokenize it and plan its sequences.
        Raises `RequestError`; no sequence runs yet."""

    def keeps(self, given: Any, generation: Generation[Any]) -> bool:
        """Whether the request is kept, so that its stream can be read on if the connection or this
        process is lost."""
        return (
            generation.stream
            and self.store is not None
            and self.settings.server.request_store_stream_age_s > 0
            and getattr(given, "store", None) is not False
            and generation.num_sequences <= MAX_KEPT
            and "/" not in generation.id  # such a path leads elsewhere
        )

    def keeper(self, given: Any, record: Record) -> Keeper:
        """What keeps the request `given`."""
        assert self.store is not None
        age_s = self.settings.server.request_store_stream_age_s
        return Keeper(self.store, record, stream_age_s=age_s)


class Again(NamedTuple):
    """A request that is answered once more. `is_stream`: how; `place`: what of the stream the
    reader has had. `is_line`: it is a line of a batch, which no store has."""

    record: Record
    is_stream: bool
    place: Place | None = None
    is_line: bool = False


class GenerationResponse(Response):
    """Reads the body, runs the endpoint and sends the reply or the stream.

    A stream is given up when its client has read nothing for `stream_stall_timeout_s`.
    """

    def __init__(self, endpoint: Endpoint, again: Again | None = None) -> None:
        """`again`: the request, if it isn't the one that comes in."""
        super().__init__()
        self._endpoint = endpoint
        self._again = again
        self._stream: EventStream | None = None
        self._keeper: Keeper | None = None
        self._outlives = False
        """Whether the answer goes on for a while when its client leaves."""
        self._left: asyncio.Task[int] | None = None
        """The answer, if its client left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        self._send_chunk: Send = state["send"]
        self._request_id: str = state["request_id"]
        key: ApiKey | None = state.get("key")
        self._trace: RequestTrace | None = state.get("trace")
        name, metrics = self._endpoint.name, self._endpoint.metrics.unnamed
        tracker = RequestTracker(metrics, name, "" if key is None else key.name)
        metrics.in_flight.labels(name).inc()
        self._shows_ids = (
            self._again is not None
            or self._endpoint.names_events
            or "text/event-stream" in Headers(scope=scope).get("accept", "")
        )
        self._on_disconnect = Headers(scope=scope).get(ON_DISCONNECT, "")
        if self._again is None:
            seed, created = secrets.randbits(128), int(time.time())
            incoming = Incoming(self._request_id, tracker, seed, created, key)
        else:
            record, is_line = self._again.record, self._again.is_line
            incoming = Incoming(
                record.request_id, tracker, record.seed, record.created, key, is_flex=is_line
            )
        status = CLIENT_GONE
        try:
            status = await self._answer(scope, receive, send, incoming)
        except (ClientDisconnect, OSError):
            pass  # no client is left to answer; counted as CLIENT_GONE
        finally:
            if self._left is not None:
                self._go_on(self._left, tracker)
            else:
                await self._end(status, tracker)

    async def _end(self, status: int, tracker: RequestTracker) -> None:
        """Note the end of the request, and return when it is kept."""
        tracker.metrics.in_flight.labels(self._endpoint.name).dec()
        tracker.end(status)
        if self._trace is not None:
            self._trace.end(status, tracker)
        if self._keeper is not None:
            await asyncio.shield(self._keeper.settle())

    def _go_on(self, answer: asyncio.Task[int], tracker: RequestTracker) -> None:
        """Let the answer go on for a while without its client."""
        server, runner = self._endpoint.settings.server, self._endpoint.runner
        assert runner is not None and self._keeper is not None
        if self._stream is not None:
            self._stream.drop()

        async def run() -> None:
            try:
                await asyncio.wait((answer,), timeout=server.on_disconnect_grace_s)
            finally:
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)
                await self._end(CLIENT_GONE, tracker)

        runner.go_on(self._keeper.record, run())

    async def _answer(self, scope: Scope, receive: Receive, send: Send, incoming: Incoming) -> int:
        if self._again is not None:
            return await self._run(self._again.record.body, incoming, receive, send)
        try:
            check_content_type(Headers(scope=scope))
            body = await read_body(Request(scope, receive), self._endpoint.settings.server)
        except RequestError as exception:
            return await _send_error(send, self._error(exception))
        return await self._run(body, incoming, receive, send)

    async def _run(self, body: bytes, incoming: Incoming, receive: Receive, send: Send) -> int:
        """Serve until the answer is complete or the client leaves or stalls. Returns the final
        status."""
        work = asyncio.create_task(self._serve(body, incoming, send))
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        watch = asyncio.create_task(self._watch_stall())
        tasks: tuple[asyncio.Task[Any], ...] = (work, gone, watch)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            return CLIENT_GONE
        finally:
            if not work.done() and self._may_go_on():
                self._left, tasks = work, (gone, watch)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _may_go_on(self) -> bool:
        runner, keeper = self._endpoint.runner, self._keeper
        if not self._outlives or runner is None or keeper is None or not keeper.is_kept:
            return False
        return runner.may_go_on(keeper.record)

    async def _serve(self, body: bytes, incoming: Incoming, send: Send) -> int:
        ticket, quotas, key = None, self._endpoint.quotas, incoming.key
        try:
            try:
                models = self._endpoint.models_provider()
                given = await parse_body(body, self._endpoint.body)
                client = models.of(self._endpoint.model_named(given))
                if len(models) > 1:
                    incoming.tracker.move(self._endpoint.metrics.of(models.label(client)))
                generation = await self._endpoint.prepare(client, given, incoming)
                self._keep(given, client.model_info, generation, body, incoming)
                await self._know(generation)
                if key is not None and key.tokens_per_minute and not generation.is_queued:
                    quotas.share(client)
                    ticket = quotas.begin(key, generation.num_prompt, incoming.tracker)
                if self._trace is not None:
                    self._trace.begin(client.model_info.name, generation.num_prompt)
                    generation.trace = self._trace
                if not generation.stream:
                    reply = await self._kept(generation, generation.result())
            except Exception as exception:
                return await _send_error(send, self._error(exception))
            if generation.stream:
                return await self._send_stream(generation, send)
            if generation.is_queued:
                assert generation.keeper is not None and self._endpoint.runner is not None
                self._endpoint.runner.answer(generation.keeper.record)
            await _send_json(send, 200, reply, {})
            return 200
        finally:
            if ticket is not None:
                quotas.end(ticket)

    def _keep(
        self,
        given: Any,
        info: ModelInfo,
        generation: Generation[Any],
        body: bytes,
        incoming: Incoming,
    ) -> None:
        """Have the request kept, and its events numbered. Raises `RequestError` if it is answered
        again and can't be as it was."""
        endpoint, again, place = self._endpoint, self._again, None
        on_disconnect = self._on_disconnect or endpoint.settings.server.on_disconnect
        if on_disconnect not in ("cancel", "continue"):
            raise RequestError(f"{ON_DISCONNECT} must be cancel or continue.", ON_DISCONNECT)
        if again is None and not endpoint.keeps(given, generation):
            if self._on_disconnect == "continue":
                raise RequestError(
                    f"{ON_DISCONNECT}: continue is for requests that are kept, and this one isn't.",
                    ON_DISCONNECT,
                )
            return
        digest, adapter = info.digest, generation.adapter_digest
        if again is None:
            record = Record(
                id=generation.id,
                owner=owner_of(incoming.key),
                endpoint=endpoint.name,
                request_id=incoming.id,
                seed=incoming.seed,
                created=incoming.created,
                digest=digest,
                adapter=adapter,
                body=body,
            )
            generation.keeper = endpoint.keeper(given, record)
        else:
            if again.is_line:
                adapter = again.record.adapter  # it may be replaced while a batch runs
            if (again.record.digest, again.record.adapter) != (digest, adapter):
                raise RequestError(
                    f"'{again.record.id}' was begun by another model or configuration than is "
                    "served now, so that it can't be gone on with.",
                    status=409,
                    code="other_model",
                )
            generation.stream, place = again.is_stream, again.place
            generation.is_line = again.is_line
            if again.is_line:
                return
            assert endpoint.store is not None
            age_s = None
            if again.record.response is None:
                age_s = endpoint.settings.server.request_store_stream_age_s
            generation.keeper = Keeper(
                endpoint.store, again.record, is_new=False, stream_age_s=age_s
            )
        self._keeper = keeper = generation.keeper
        # Another process goes on with answers in the background.
        self._outlives = on_disconnect == "continue" and not keeper.record.is_background
        if generation.stream and (self._shows_ids or place is not None):
            name = tagged(keeper.record)
            generation.numbers = EventNumbers(
                name, generation.num_sequences, place, shown=self._shows_ids
            )

    async def _know(self, generation: Generation[Any]) -> None:
        """Find the tokens of a request that is answered again, and have new ones kept."""
        keeper, store, runner = generation.keeper, self._endpoint.store, self._endpoint.runner
        if keeper is None or generation.is_queued or not generation.is_all_tokens:
            return
        assert store is not None and runner is not None
        if not keeper.is_new:
            try:
                pieces = await store.tokens_of(keeper.record)
                generation.known_ids = read_tokens(pieces, generation.num_sequences)
            except RequestError:  # the store has said why
                pass
        generation.tokens = AnswerTokens(
            keeper.record, generation.num_sequences, generation.known_ids
        )
        keeper.keep_tokens(generation.tokens, runner.token_log)

    async def _kept(self, generation: Generation[Any], answer: Awaitable[bytes]) -> bytes:
        """What `answer` gives; the store learns how it ended."""
        try:
            end = await answer
        except (asyncio.CancelledError, ClientDisconnect):
            if generation.keeper is not None:
                generation.keeper.leave(generation.response_to_keep())
            raise
        except Exception as error:
            is_refused = isinstance(error, RequestError) and error.status < 500
            if generation.keeper is not None:
                if is_refused or self._stream is None or not self._stream.has_begun:
                    generation.keeper.forget()
                else:
                    generation.keeper.leave(generation.response_to_keep())
            raise
        keeper = generation.keeper
        if keeper is not None and not generation.is_queued:
            response = generation.response_to_keep()
            if response is not None:
                # Also if its client leaves now.
                await asyncio.shield(keeper.end(response))
            elif generation.is_aborted:
                keeper.forget()
            else:
                keeper.end_later()
        return end

    def _error(self, exception: Exception) -> ErrorReply:
        return self._endpoint.error_reply(failure_of(exception, self._request_id))

    async def _send_stream(self, generation: Generation[Any], send: Send) -> int:
        """Send events as they come. An error before the first event is answered with its status."""
        self._stream = stream = EventStream(
            send, self._send_chunk, generation.begin_keeping(), outlives=self._outlives
        )
        status = 200
        try:
            try:
                last_event = await self._kept(generation, generation.send_events(stream))
            except ClientDisconnect:
                raise
            except Exception as exception:
                failure = failure_of(exception, self._request_id)
                error = self._endpoint.error_reply(failure)
                if not stream.has_begun:
                    return await _send_error(send, error)
                status, last_event = error.status, generation.error_event(failure, error)
            await stream.end(last_event)
        finally:
            await stream.close()
        return status

    async def _watch_stall(self) -> None:
        """Return when an event has waited too long for the client to read it."""
        while True:
            since = self._stream.waiting_since if self._stream is not None else None
            waited = time.monotonic() - since if since is not None else 0.0
            left = self._endpoint.settings.server.stream_stall_timeout_s - waited
            if left <= 0:
                return
            await asyncio.sleep(left)


async def _send_error(send: Send, error: ErrorReply) -> int:
    await _send_json(send, error.status, error.body, error.headers)
    return error.status


async def _send_json(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **headers,
    }
    await send({"type": "http.response.start", "status": status, "headers": _raw(headers)})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return Headers(headers).raw


async def _wait_for_disconnect(receive: Receive) -> None:
    try:
        while True:
            message: Any = await receive()
            if message["type"] == "http.disconnect":
                return
    except Exception as exception:
        # Under Serve, `receive` fails with TaskCancelledError when the client has left.
        logger.debug("client lost: %s", type(exception).__name__)
