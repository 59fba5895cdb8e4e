"""`Attempt`: one try to run a sequence, on one tokenizer and one engine replica."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from deploy.ingress.engine_watch import EngineWatch
from deploy.ingress.replica_router import ReplicaRouter, input_of
from deploy.ingress.resume import AttemptLostError, Loss, Progress
from deploy.ingress.tokenizer_link import TokenizerLink, TokenizerLostError
from engine.errors import EngineDeadError, EngineDrainingError, RequestError
from engine.protocol import encoding
from engine.protocol import tokenizer_messages as tm
from engine.protocol.messages import AbortRequest
from engine.protocol.tokenizer_messages import TextDelta

logger = logging.getLogger(__name__)

KNOWN_AT_ONCE = 128
"""Deltas of known tokens that a reader gets in one piece."""
END_TIMEOUT_S = 10.0
"""After the engine said that a request has ended, its last text must arrive in this time."""


class Attempts:
    """The open attempts of one ingress. The request id in a message tells which one it is for."""

    def __init__(
        self,
        tokenizer: TokenizerLink,
        engines: Any,
        watch: EngineWatch,
        address: str,
        router: ReplicaRouter | None = None,
    ) -> None:
        """`engines` is Serve's handle, `address` the ingress' inbox. Without a `router`, Serve
        chooses the replica."""
        self.tokenizer = tokenizer
        self.watch = watch
        self.address = address
        self.router = router
        self._engines = engines
        self._rids = itertools.count(1)
        self._open: dict[int, Attempt] = {}
        self._due: list[list[TextDelta]] = []
        """Messages whose deltas the readers have not been given yet."""
        self._at: dict[str, dict[int, Attempt]] = {}
        """Attempts that a replica has taken, by the replica's inbox and the request id."""
        self._trial = asyncio.Lock()
        """The lock that the one suspect request that may run holds."""
        self._calls: set[asyncio.Future[None]] = set()
        """Open calls. They outlive their attempts: a call returns when the scheduler has let go of
        the request."""

    def __len__(self) -> int:
        return len(self._open)

    async def generate(self, progress: Progress, read: Callable[[list[TextDelta]], None]) -> None:
        """Run one sequence to its end, with further attempts where one is lost. Each call of `read`
        gets all deltas that are there.

        Raises `RequestError` if an engine refuses or fails the request or if it can't go on,
        `EngineDeadError` if no engine takes it, and what `read` raises. Cancelling aborts it.
        """
        while True:
            trial = await self._begin_trial(progress) if progress.is_suspect else None
            attempt = Attempt(next(self._rids), progress, read, self, trial)
            self._open[attempt.rid] = attempt
            try:
                await attempt.start()
                await attempt.wait()
                return
            except AttemptLostError as error:
                request, at = progress.sequence.request_id, len(progress.output_ids)
                logger.warning("request %s at token %d: %s", request, at, error)
                pause_s = progress.lost(error)
            finally:
                attempt.close()
            await asyncio.sleep(pause_s)

    async def _begin_trial(self, progress: Progress) -> asyncio.Lock | None:
        """Wait until no other suspect runs, and return the lock. None if the wait takes longer
        than the request may wait for an engine."""
        try:
            async with asyncio.timeout(progress.wait_left_s):
                await self._trial.acquire()
        except TimeoutError:
            return None
        return self._trial

    def close(self, attempt: Attempt) -> None:
        """Forget an attempt; messages for it are dropped from now on."""
        self._open.pop(attempt.rid, None)
        there = self._at.get(attempt.replica, {})
        if there.pop(attempt.rid, None) is not None and not there:
            del self._at[attempt.replica]

    def deliver(self, deltas: list[TextDelta]) -> None:
        """Take text that came; text of closed attempts is dropped. Readers get theirs once all
        messages that are there have been taken, so that a reader who is behind gets one piece."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._due.append(deltas)

    def _hand_over(self) -> None:
        due, self._due = self._due, []
        for rid, deltas in _by_request(due):
            attempt = self._open.get(rid)
            if attempt is not None:
                attempt.hand_over(deltas)

    def taken(self, rid: int, replica: str) -> None:
        """A replica has handed the request to its scheduler."""
        attempt = self._open.get(rid)
        if attempt is not None:
            attempt.replica = replica
            there = self._at.setdefault(replica, {})
            there[rid] = attempt
            if len(there) > 1:  # the first one learns it now, all others at once
                attempt.in_company = next(iter(there.values())).in_company = True
            if self.router is not None:
                self.router.taken(rid, replica)
        else:  # its call was cancelled too late; if the request has ended, this has no effect
            self.watch.send(replica, AbortRequest(rid=rid, reply_to=self.tokenizer.address))

    def replica_lost(self, replica: str, *, is_last: bool) -> None:
        """Fail the attempts that no replica has taken yet: they may be on the way to the lost one,
        and their calls may not end for a long time if its host is gone too. What it has taken goes
        on elsewhere; if it is the last one, with itself, because it may only be cut off."""
        for attempt in list(self._open.values()):
            if not attempt.replica or (attempt.replica == replica and not is_last):
                attempt.lose_engine("a replica was lost")

    def fail_all(self, error: Exception) -> None:
        """Fail every attempt that is open now with a copy of `error`."""
        for attempt in self._open.values():
            attempt.fail(copy.copy(error))  # one exception raised by many gathers all tracebacks

    def call_engine(self, request: bytes, actor: str) -> asyncio.Task[None]:
        """Open the Serve call of an encoded `AddRequest`. It goes to the replica whose actor is
        named, or to any if `actor` is "". It lasts until the scheduler has let go of the request.
        """
        # The call gets a context of its own. In the HTTP request's context Serve would see it as a
        # child of that request and cancel it when the client leaves, before we know.
        loop = asyncio.get_running_loop()
        call = loop.create_task(self._call(request, actor), context=contextvars.Context())
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def _call(self, request: bytes, actor: str) -> None:
        response = self._engines.generate.remote(request, self.address, actor)
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()
            raise


class Attempt:
    """One try. It has a request id of its own with the tokenizer, and one open call."""

    def __init__(
        self,
        rid: int,
        progress: Progress,
        read: Callable[[list[TextDelta]], None],
        attempts: Attempts,
        trial: asyncio.Lock | None = None,
    ) -> None:
        self.rid = rid
        self.replica = ""
        """Inbox of the engine replica that took the request; "" until one has."""
        self.in_company = False
        """Whether that engine has had other requests of this ingress meanwhile."""
        self._progress = progress
        self._read = read
        self._attempts = attempts
        self._trial = trial
        """The trial's lock, held until the first text; None if this is no trial."""
        self._reply_to = ""
        self._call: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        """True once there is nothing left to abort."""
        self._ended = asyncio.Event()
        self._error: Exception | None = None
        self._has_text = False
        self._is_lost = False

    async def start(self) -> None:
        """Register the request with the tokenizer and open the call.

        Raises `AttemptLostError`, `RequestError`, and `EngineDeadError` if there is no tokenizer.
        """
        progress, attempts = self._progress, self._attempts
        sequence = progress.sequence
        loop = asyncio.get_running_loop()

        def register(call: int) -> tm.Register:
            return progress.register(call, attempts.address, self.rid)

        try:
            registered = await attempts.tokenizer.ask_once(register, progress.wait_left_s)
        except TokenizerLostError as error:
            raise AttemptLostError(Loss.TOKENIZER, "it was lost") from error
        if registered.error:
            raise RequestError(registered.error, status=500)
        await self._hand_over_known(registered.deltas)
        self._reply_to = attempts.tokenizer.address
        if not self._reply_to:
            raise AttemptLostError(Loss.TOKENIZER, "it was lost")
        add = progress.add_request(self.rid, self._reply_to)
        actor = ""
        if attempts.router is not None:
            adapter = "" if sequence.adapter is None else sequence.adapter.digest
            actor, add.page_hashes = attempts.router.route(
                self.rid,
                input_of(sequence.prompt_ids, add.output_ids),
                sequence.namespace,
                adapter,
                is_flex=sequence.is_flex,
            )
        self._call = attempts.call_engine(encoding.encode_inline(add), actor)
        self._call.add_done_callback(self._on_call_end)
        self._timer = loop.call_later(progress.wait_left_s, self._check_taken)

    async def _hand_over_known(self, deltas: list[TextDelta]) -> None:
        """Give the reader the deltas of known tokens, and others a turn between them."""
        for begin in range(0, len(deltas), KNOWN_AT_ONCE):
            some = deltas[begin : begin + KNOWN_AT_ONCE]
            for delta in some:
                self._progress.take_known(delta)
            self._read(some)
            await asyncio.sleep(0)

    async def wait(self) -> None:
        """Return when the reader has got the last delta. Raises what `fail` was given."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    def fail(self, error: Exception) -> None:
        """End the attempt with `error`, unless it has ended already."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def hand_over(self, deltas: list[TextDelta]) -> None:
        """Give the reader the deltas that have come. An error here fails only this attempt."""
        if self._ended.is_set() or self._is_over:
            return
        if not self._has_text:
            self._has_text = True
            self._end_trial()
            if self._attempts.router is not None:
                self._attempts.router.first_token(self.rid)
        try:
            self._pass_on(deltas)
        except Exception as error:
            self.fail(error)
            return
        if deltas[-1].finish_reason is not None:
            self._is_over = True
            self._ended.set()

    def _pass_on(self, deltas: list[TextDelta]) -> None:
        for count, delta in enumerate(deltas):
            try:
                self._progress.take(delta)
            except (AttemptLostError, RequestError):
                if count:  # the reader still gets what came before it
                    self._read(deltas[:count])
                raise
        self._read(deltas)

    def close(self) -> None:
        """Let go of everything. The request is aborted if it hasn't ended."""
        attempts = self._attempts
        attempts.close(self)
        self._end_trial()
        if attempts.router is not None:
            attempts.router.finished(self.rid, lost=self._is_lost)
        if self._timer is not None:
            self._timer.cancel()
        if self._is_over:
            return
        self._is_over = True
        attempts.tokenizer.send(tm.Unregister(self.rid))
        if self._call is None:
            return
        abort = AbortRequest(rid=self.rid, reply_to=self._reply_to)
        # A message costs a hundredth of cancelling the call; the call returns once the message is
        # obeyed. It is sent even if the call is over: a cancelled call may have left the request.
        if not self.replica or not attempts.watch.send(self.replica, abort):
            self._call.cancel()

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._trial.release()
            self._trial = None

    def _check_taken(self) -> None:
        if not self.replica:
            self.fail(AttemptLostError(Loss.NOT_TAKEN, "no engine took the request"))

    def _on_call_end(self, call: asyncio.Future[None]) -> None:
        # We did not cancel this call, so it was cancelled on the replica's side.
        error = asyncio.CancelledError() if call.cancelled() else call.exception()
        if self._is_over:
            return
        if error is not None:
            self.fail(self._loss_of(error))
            return
        lost = AttemptLostError(Loss.ENGINE, "the call ended, but the last tokens never came")
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(END_TIMEOUT_S, self.fail, lost)

    def _loss_of(self, error: BaseException) -> Exception:
        """What it means that the call ended by `error`: in most cases its engine is lost."""
        name = type(error).__name__
        if isinstance(error, EngineDrainingError):
            self._is_lost = True
            return AttemptLostError(Loss.DRAIN, str(error))
        lost = isinstance(error, EngineDeadError | asyncio.CancelledError | grpc.RpcError) or (
            isinstance(error, RayError | RayServeException) and not isinstance(error, RayTaskError)
        )
        if not lost:
            assert isinstance(error, Exception)
            return error
        return self._engine_lost(name)

    def lose_engine(self, detail: str) -> None:
        """End the attempt because its engine is lost."""
        if not self._is_over and self._call is not None:
            self.fail(self._engine_lost(detail))

    def _engine_lost(self, detail: str) -> AttemptLostError:
        self._is_lost = True
        # An engine that never took the request can't have been lost because of it.
        if not self.replica:
            return AttemptLostError(Loss.NOT_TAKEN, detail)
        return AttemptLostError(Loss.ENGINE, detail, in_company=self.in_company)


def _by_request(messages: list[list[TextDelta]]) -> Iterable[tuple[int, list[TextDelta]]]:
    """Deltas of several messages by request, in order."""
    found: dict[int, list[TextDelta]] = {}
    for deltas in messages:
        for delta in deltas:
            found.setdefault(delta.rid, []).append(delta)
    return found.items()
