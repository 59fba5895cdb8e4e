"""An engine replica asks its scheduler and waits for the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from deploy.replica.scheduler_calls import SchedulerCalls
from engine.protocol.async_inbox import AsyncInbox
from engine.protocol.transport import Outbox
from tests.support.scheduler_thread import HOST, SchedulerThread


@pytest.fixture
def scheduler() -> Iterator[SchedulerThread]:
    made = SchedulerThread()
    yield made
    made.stop()


class Replica:
    """The part of a replica that asks."""

    def __init__(self, scheduler: SchedulerThread) -> None:
        self._inbox = AsyncInbox(HOST, self._on_message)
        self._outbox = Outbox(scheduler.inbox.address)
        self.calls = SchedulerCalls(self._outbox, self._inbox.address)

    def _on_message(self, message: object) -> None:
        self.calls.answered(message)  # type: ignore[arg-type]

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()


def test_a_token_and_a_flush(scheduler: SchedulerThread) -> None:
    async def run() -> None:
        replica = Replica(scheduler)
        async with asyncio.timeout(20):
            ends = await asyncio.gather(*(replica.calls.generate_token() for _ in range(3)))
            assert [(end.reason, end.num_output) for end in ends] == [("length", 1)] * 3
            assert await replica.calls.flush_cache() == ""
        replica.close()

    asyncio.run(run())


def test_who_stops_waiting_aborts(scheduler: SchedulerThread) -> None:
    async def run() -> None:
        replica = Replica(scheduler)
        scheduler.works.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await replica.calls.generate_token()
        requests = scheduler.role.scheduler.requests.by_key
        deadline = time.monotonic() + 10
        while not all(request.finished for request in requests.values()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        scheduler.works.set()
        async with asyncio.timeout(20):
            assert await replica.calls.flush_cache() == ""
        replica.close()

    asyncio.run(run())


def test_a_full_queue_says_so() -> None:
    scheduler = SchedulerThread(max_queued_requests=1, max_running_requests=1)
    scheduler.works.clear()

    async def run() -> None:
        replica = Replica(scheduler)
        waits = [asyncio.create_task(replica.calls.generate_token()) for _ in range(4)]
        async with asyncio.timeout(20):
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            assert {task.result().status for task in done} == {429}
            scheduler.works.set()
            await asyncio.gather(*waits)
        replica.close()

    asyncio.run(run())
    scheduler.stop()
