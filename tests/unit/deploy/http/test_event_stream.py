"""Streams of events: sent where they arise, in order whatever the server makes us wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from deploy.http.eager import run_eagerly
from deploy.http.generation.backlog import MAX_WAITING, Backlog, join
from deploy.http.generation.event_stream import EventStream
from engine.protocol.tokenizer_messages import LogprobEntry, TextDelta


def delta(text: str) -> TextDelta:
    return TextDelta(1, text, [], 0, None, None, 0, 0)


# --- coroutines that have begun


def test_what_never_waits_has_ended() -> None:
    ran = []

    async def run() -> None:
        ran.append(1)

    assert run_eagerly(run()) is None and ran == [1]

    async def fail() -> None:
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        run_eagerly(fail())


def test_the_rest_goes_on_in_a_task() -> None:
    async def run() -> None:
        seen: list[Any] = []
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(3)]

        async def work() -> None:
            for future in futures:
                try:
                    seen.append(await future)
                except ValueError as error:
                    seen.append(str(error))
            await asyncio.sleep(0)
            raise KeyError("the end")

        rest = run_eagerly(work())
        assert rest is not None and seen == []
        futures[0].set_result("a")  # done before the task begins
        task = asyncio.ensure_future(rest)
        await asyncio.sleep(0)
        loop.call_later(0.01, futures[1].set_exception, ValueError("b"))
        loop.call_later(0.02, futures[2].set_result, "c")
        with pytest.raises(KeyError, match="the end"):
            await task
        assert seen == ["a", "b", "c"]

    asyncio.run(run())


def test_the_rest_can_be_cancelled() -> None:
    async def run() -> None:
        closed = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                closed.append(True)

        rest = run_eagerly(work())
        assert rest is not None
        task = asyncio.ensure_future(rest)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [True]

    asyncio.run(run())


# --- the stream


class Server:
    """Takes messages at once, or waits where `waits` says so."""

    def __init__(self, waits: Callable[[int], bool]) -> None:
        self.messages: list[Any] = []
        self.reads = asyncio.Event()
        self.error: OSError | None = None
        self._waits = waits

    async def send(self, message: Any) -> None:
        if self._waits(len(self.messages)):
            await self.reads.wait()
            self.reads.clear()
        if self.error is not None:
            raise self.error
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        start, *chunks = self.messages
        assert start["type"] == "http.response.start" and start["status"] == 200
        return b"".join(chunk["body"] for chunk in chunks)


class Writer:
    """Writes as a generation does: into a backlog while the stream is behind."""

    def __init__(self, stream: EventStream) -> None:
        self.stream = stream
        self.backlog: list[bytes] = []

    def write(self, events: bytes) -> None:
        if self.stream.catching_up is not None:
            self.backlog.append(events)
        else:
            self.stream.write(events, self.catch_up)

    def catch_up(self) -> bytes:
        waiting, self.backlog = self.backlog, []
        return b"".join(waiting)


@settings(max_examples=100)
@given(
    waits=st.sets(st.integers(0, 20)),
    turns=st.lists(st.integers(0, 3), max_size=15),
)
def test_events_arrive_whole_and_in_order(waits: set[int], turns: list[int]) -> None:
    async def run() -> None:
        server = Server(waits.__contains__)
        writer = Writer(stream := EventStream(server.send, server.send))

        async def read() -> None:
            while True:
                await asyncio.sleep(0)
                server.reads.set()

        reader = asyncio.ensure_future(read())
        for number, count in enumerate(turns):
            writer.write(b"%d " % number)
            assert stream.has_begun
            for _ in range(count):
                await asyncio.sleep(0)
        await stream.end(b"end")
        await stream.close()
        reader.cancel()
        assert server.body == b"".join(b"%d " % n for n in range(len(turns))) + b"end"
        assert [m["more_body"] for m in server.messages[1:]][-1:] == [False]
        assert all(m["more_body"] for m in server.messages[1:-1])
        assert stream.waiting_since is None and stream.catching_up is None

    asyncio.run(run())


def test_an_idle_server_gets_events_without_a_task() -> None:
    async def run() -> None:
        server = Server(lambda number: False)
        writer = Writer(stream := EventStream(server.send, server.send))
        before = asyncio.all_tasks()
        for number in range(5):
            writer.write(b"%d" % number)
            assert len(server.messages) == 2 + number, "sent before write returned"
        assert asyncio.all_tasks() == before and stream.waiting_since is None

    asyncio.run(run())


def test_a_client_that_does_not_read_is_told_by_the_clock() -> None:
    async def run() -> None:
        server = Server(lambda number: number == 3)
        writer = Writer(stream := EventStream(server.send, server.send))
        for number in range(9):
            writer.write(b"%d" % number)
        await asyncio.sleep(0)
        assert stream.catching_up is not None and stream.waiting_since is not None
        assert server.body == b"01" and writer.backlog == [b"3", b"4", b"5", b"6", b"7", b"8"]
        await stream.close()
        assert server.body == b"01"

    asyncio.run(run())


@pytest.mark.parametrize("waits_at", [None, 0, 2])
def test_a_lost_connection_is_a_client_that_left(waits_at: int | None) -> None:
    async def run() -> None:
        server = Server(lambda number: number == waits_at)
        writer = Writer(stream := EventStream(server.send, server.send))
        with pytest.raises(ClientDisconnect):
            for number in range(4):
                if number == 2:
                    server.error = OSError("reset")
                    server.reads.set()
                writer.write(b"%d" % number)
                await asyncio.sleep(0)
            await stream.flush()
        await stream.close()

    asyncio.run(run())


# --- deltas that wait


def test_a_backlog_gives_back_what_waited() -> None:
    """It holds few objects meanwhile."""
    backlog = Backlog()
    count = 3 * MAX_WAITING + 5

    def piece(i: int) -> TextDelta:
        entry = LogprobEntry(str(i), i, -1.0, [], [], i) if i % 2 else None
        delta = TextDelta(1, f"{i} ", [i], i + 1, None, None, 7, 3, entry and [entry])
        if i == 0:
            delta.prompt_logprobs = [None]
        if i + 1 == count:
            delta.finish_reason, delta.stop_reason = "stop", "x"
        return delta

    for i in range(count):
        backlog.add([piece(i)])
        assert len(backlog) < MAX_WAITING + 4
    got = backlog.take()
    assert len(backlog) == 0 == len(backlog.take())
    for delta in got:
        delta.logprobs = delta.logprobs or None
    assert got == [piece(i) for i in range(count)]


def test_joined_error_keeps_its_words() -> None:
    end = delta("b")
    end.finish_reason, end.error, end.error_status = "error", "too late", 408
    joined = join([delta("a"), end])
    assert (joined.text, joined.error, joined.error_status) == ("ab", "too late", 408)
