"""The asyncio side of an inbox: nothing is lost, and a burst doesn't keep others waiting."""

from __future__ import annotations

import asyncio
import time

from engine.protocol.async_inbox import MAX_AT_ONCE, AsyncInbox
from engine.protocol.messages import RequestTaken
from engine.protocol.transport import Outbox

COUNT = 5 * MAX_AT_ONCE + 3


def test_a_burst_arrives_whole_and_in_order_and_lets_others_run() -> None:
    async def run() -> tuple[list[int], int]:
        got: list[int] = []
        done = asyncio.Event()

        def on_message(message: RequestTaken) -> None:
            got.append(message.rid)
            if len(got) == COUNT:
                done.set()

        inbox = AsyncInbox("127.0.0.1", on_message)
        outbox = Outbox(inbox.address)
        for rid in range(COUNT):
            outbox.send(RequestTaken(rid, ""))
        time.sleep(0.2)  # blocks the loop until they are here
        largest = before = 0
        async with asyncio.timeout(20):
            while not done.is_set():
                await asyncio.sleep(0)
                largest, before = max(largest, len(got) - before), len(got)
        inbox.close()
        outbox.close()
        return got, largest

    got, largest = asyncio.run(run())
    assert got == list(range(COUNT))
    assert largest <= MAX_AT_ONCE
