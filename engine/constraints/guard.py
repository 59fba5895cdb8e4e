"""`GrammarGuard`: refuses grammars that an engine must not see.

A grammar comes from a client and is compiled by native code, which some grammars crash (they
overflow its stack) and others keep busy. So each is compiled here first, in a process of its own,
with the same limits. What doesn't come back from there costs its own request alone. What does is
compiled again by the scheduler.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from engine.constraints.base import ConstraintSpec
from engine.constraints.grammar_payload import grammar_key, parse_grammar, refused
from engine.constraints.guard_process import (
    GuardLostError,
    GuardProcess,
    GuardReply,
    GuardUnavailableError,
)
from engine.errors import RequestError

logger = logging.getLogger(__name__)

TIMEOUT_S = 1.0
"""CPU time to compile a grammar and follow it for some tokens."""
MAX_VERDICTS = 4096
MAX_WAITING = 64
"""Grammars that wait to be checked; more are refused."""
LATE_FOR_S = 60.0
"""How long a grammar that took too long is refused without another check."""


class _Verdict(NamedTuple):
    """`message`: why the grammar is refused, "" if it isn't. Valid up to the time `until`."""

    message: str
    until: float


class GrammarGuard:
    """Checks grammars one by one, each once; it remembers the last `MAX_VERDICTS`.

    The process is started for the first grammar, and again when it is lost. Thread-safe.
    """

    def __init__(
        self,
        model_path: str | Path,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model_path = str(model_path)
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self.verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._executor: ThreadPoolExecutor | None = None
        self.num_waiting = 0
        self.process: GuardProcess | None = None
        self._unavailable = ""
        """Why no grammar can be checked for this model."""
        self._is_shut_down = False

    def check(self, spec: ConstraintSpec) -> None:
        """Raise `RequestError` if an engine must not see the constraint. Takes up to some seconds.

        Constraints of other kinds than grammars pass.
        """
        self.submit(spec).result()

    def submit(self, spec: ConstraintSpec) -> Future[None]:
        """`check` in a thread of the guard's own. Raises what can be said at once."""
        done: Future[None] = Future()
        done.set_result(None)
        if spec.kind != "grammar":
            return done
        parse_grammar(spec.payload)
        key = grammar_key(spec.payload)
        with self._lock:
            if self._is_shut_down:
                raise RequestError("the server is being stopped", status=503)
            verdict = self._known(key)
            if verdict is None:
                if self.num_waiting >= MAX_WAITING:
                    raise RequestError(
                        f"{MAX_WAITING} grammars wait to be checked; try again later", status=429
                    )
                self.num_waiting += 1
                if self._executor is None:
                    # One thread, which lives as long as the guard: the process ends with it.
                    self._executor = ThreadPoolExecutor(1, "grammar-guard")
                future = self._executor.submit(self._check, key, spec.payload)
        if verdict is None:
            future.add_done_callback(self._one_less_waits)
            return future
        _raise_if_refused(verdict)
        return done

    def shutdown(self) -> None:
        """End the process. Checks under way fail."""
        with self._lock:
            self._is_shut_down = True
            executor, self._executor = self._executor, None
            process = self.process
        if process is not None:
            process.kill()
        if executor is not None:
            executor.submit(self._close)
            executor.shutdown(wait=False)

    # In the guard's thread

    def _check(self, key: bytes, payload: dict[str, Any]) -> None:
        with self._lock:
            verdict = self._known(key)  # a request with the same grammar may have been before
        if verdict is None:
            reply = self._ask(payload)
            if reply.verdict == "starved":
                raise RequestError(
                    "the machine is too busy to check the grammar; try again later", status=503
                )
            late = reply.verdict == "late"
            until = self._clock() + LATE_FOR_S if late else math.inf
            verdict = _Verdict(self._words(reply), until)
            with self._lock:
                self.verdicts[key] = verdict
                if len(self.verdicts) > MAX_VERDICTS:
                    self.verdicts.popitem(last=False)
        _raise_if_refused(verdict)

    def _ask(self, payload: dict[str, Any]) -> GuardReply:
        """The process' answer. The process is started if need be, and again if it is lost."""
        reason = ""
        for _ in range(2):
            if self._unavailable or self._is_shut_down:
                break
            try:
                return self._started().ask(payload)
            except GuardLostError as error:
                logger.warning("the grammar guard is lost: %s", error)
                self._close()
                reason = str(error)
            except GuardUnavailableError as error:
                logger.warning("no structured output: %s", error)
                self._unavailable = str(error)
        if self._unavailable:
            raise refused(f"structured output isn't available: {self._unavailable}")
        raise RequestError(
            f"structured output isn't available now, since grammars can't be checked ({reason})",
            status=503,
        )

    def _started(self) -> GuardProcess:
        if self.process is None:
            process = GuardProcess(self._model_path, self._timeout_s)
            with self._lock:
                self.process = process
                if not self._is_shut_down:
                    return process
            self._close()
            raise GuardLostError("the server is being stopped")
        return self.process

    def _close(self) -> None:
        with self._lock:
            process, self.process = self.process, None
        if process is not None:
            process.close()

    def _words(self, reply: GuardReply) -> str:
        match reply.verdict:
            case "ok":
                return ""
            case "late":
                return f"the grammar takes longer than {self._timeout_s:g} s to compile"
            case "died":
                return f"the grammar crashes the compiler ({reply.message}); make it simpler"
            case _:
                return reply.message

    # Anywhere

    def _known(self, key: bytes) -> _Verdict | None:
        verdict = self.verdicts.get(key)
        if verdict is None or self._clock() > verdict.until:
            return None
        self.verdicts.move_to_end(key)
        return verdict

    def _one_less_waits(self, _: Future[None]) -> None:
        with self._lock:
            self.num_waiting -= 1


def _raise_if_refused(verdict: _Verdict) -> None:
    if verdict.message:
        raise refused(verdict.message)
