"""Requests wait beside the loop while their grammar is compiled, and nobody else does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from engine.constraints import ConstraintSpec, structured
from engine.constraints.grammar_compiler import GrammarCompiler
from engine.executor.message_executor import ReadyWorkers
from engine.grammars.model_compiler import tokenizer_json
from engine.loop.scheduler_role import SchedulerRole
from engine.protocol.messages import (
    AbortRequest,
    AddRequest,
    ReaderGone,
    RequestsDone,
    Shutdown,
    StepOutputs,
)
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.transport import Inbox, Outbox
from engine.scheduler.grammar_queue import GrammarQueue
from tests.support.grammars import EOS, MODEL, VOCAB
from tests.support.requests import add_request
from tests.support.scheduler_configs import scheduler_config

HOST = "127.0.0.1"


class SlowCompiler(GrammarCompiler):
    """Compiles when it may."""

    def __init__(self) -> None:
        super().__init__(lambda: tokenizer_json(MODEL), VOCAB, EOS)
        self.may = threading.Event()

    def _compile(self, grammar: Any) -> Any:
        assert self.may.wait(20)
        return super()._compile(grammar)


@pytest.fixture
def compiler() -> Iterator[SlowCompiler]:
    made = SlowCompiler()
    yield made
    made.may.set()


def request(rid: int, spec: ConstraintSpec | None, **more: Any) -> AddRequest:
    params = SamplingParams(seed=0, constraint=spec)
    return add_request(rid=rid, input_ids=np.array([5, 6], np.int32), params=params, **more)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it doesn't happen"
        time.sleep(0.002)


def test_requests_leave_in_order_when_their_grammar_is_compiled(compiler: SlowCompiler) -> None:
    queue = GrammarQueue(compiler)
    first = structured.regex("a")
    assert queue.hold(request(1, first), 1.0) and queue.hold(request(2, first), 2.0)
    assert queue.hold(request(3, structured.regex("(a")), 3.0)
    assert not queue.hold(request(4, ConstraintSpec("token_choice", {"choices": [[1]]})), 4.0)
    assert not queue.take() and len(queue) == 3
    queue.drop("", 2)
    compiler.may.set()
    taken: list[tuple[AddRequest, float]] = []
    until(lambda: bool(taken.extend(queue.take()) or len(taken) == 2))
    assert [(r.rid, arrival) for r, arrival in taken] == [(1, 1.0), (3, 3.0)]
    assert not queue.hold(request(5, first), 5.0), "it is compiled"
    assert len(queue) == 0


def test_a_readers_requests_are_forgotten_together(compiler: SlowCompiler) -> None:
    queue = GrammarQueue(compiler)
    for rid, reader in ((1, "a"), (2, "b"), (3, "a")):
        assert queue.hold(request(rid, structured.regex("a"), reply_to=reader), 0.0)
    queue.drop("a")
    compiler.may.set()
    taken: list[tuple[AddRequest, float]] = []
    until(lambda: bool(taken.extend(queue.take()) or taken))
    assert [r.rid for r, _ in taken] == [2]


def test_without_a_compiler_nothing_waits() -> None:
    assert not GrammarQueue(None).hold(request(1, structured.regex("a")), 0.0)


class Role:
    """A scheduler's process as a thread; `reader` gets its outputs, `owner` the ends."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.inbox, self.results, self.worker = Inbox(HOST), Inbox(HOST), Inbox(HOST)
        self.reader, self.owner = Inbox(HOST), Inbox(HOST)
        config = scheduler_config(
            num_kv_tokens=256, max_model_len=64, vocab_size=VOCAB, page_size=4
        )
        workers = ReadyWorkers([self.worker.address], 256)
        self.role = SchedulerRole(config, self.inbox, workers, self.results, compiler)
        self.added: list[int] = []
        add = self.role.scheduler.add

        def note(request: AddRequest, now: float) -> None:
            self.added.append(request.rid)
            add(request, now)

        self.role.scheduler.add = note  # type: ignore[method-assign]
        self._outbox = Outbox(self.inbox.address)
        self._thread = threading.Thread(target=self.role.run, args=(lambda: "",))
        self._thread.start()

    def send(self, message: Any) -> None:
        self._outbox.send(message)

    def add(self, rid: int, spec: ConstraintSpec | None) -> None:
        self.send(request(rid, spec, reply_to=self.reader.address, owner=self.owner.address))

    def close(self) -> None:
        self.send(Shutdown())
        self._thread.join(10)
        self._outbox.close()
        for inbox in (self.worker, self.reader, self.owner):
            inbox.close()
        assert not self._thread.is_alive()


@pytest.fixture
def role(compiler: SlowCompiler) -> Iterator[Role]:
    made = Role(compiler)
    yield made
    compiler.may.set()
    made.close()


def test_the_loop_goes_on_while_a_grammar_is_compiled(role: Role, compiler: SlowCompiler) -> None:
    role.add(1, structured.regex("a"))
    role.add(2, None)
    until(lambda: role.added == [2])
    turn = role.role.last_turn
    until(lambda: role.role.last_turn > turn)
    compiler.may.set()
    until(lambda: role.added == [2, 1])


def test_a_grammar_that_fails_in_the_scheduler_fails_its_request(
    role: Role, compiler: SlowCompiler
) -> None:
    compiler.may.set()
    role.add(1, structured.regex("(a"))
    message = role.reader.recv(20.0)
    assert isinstance(message, StepOutputs)
    (end,) = message.finished
    assert (end.reason, end.status, end.param) == ("error", 400, "constraint")
    assert "unclosed group" in end.message
    assert role.owner.recv(20.0) == RequestsDone([(role.reader.address, 1)])


def test_leaving_while_the_grammar_is_compiled(role: Role, compiler: SlowCompiler) -> None:
    for rid in (1, 2):
        role.add(rid, structured.regex("a"))
    role.send(AbortRequest(rid=1, reply_to=role.reader.address))
    assert role.owner.recv(20.0) == RequestsDone([(role.reader.address, 1)])
    role.send(ReaderGone(role.reader.address))
    assert role.owner.recv(20.0) == RequestsDone([(role.reader.address, 2)])
    compiler.may.set()
    role.add(3, None)
    until(lambda: role.added == [3])


def test_an_unexpected_error_of_the_compiler_costs_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Panic(BaseException):
        """As native code raises it."""

    def panic(self: GrammarCompiler, grammar: Any) -> Any:
        raise Panic

    compiler = GrammarCompiler(lambda: tokenizer_json(MODEL), VOCAB, EOS)
    monkeypatch.setattr(GrammarCompiler, "_compile", panic)
    future: Future[Any] | None = compiler.prepare(structured.regex("a").payload)
    assert future is not None
    assert "can't be compiled (Panic)" in future.result().message
