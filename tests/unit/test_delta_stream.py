"""DeltaStream: order, wake-ups, failure after what is already there."""

from __future__ import annotations

import asyncio

import pytest

from deploy.delta_stream import DeltaStream
from engine.errors import EngineDeadError
from engine.tokenizer.detokenizer_manager import TextDelta


def delta(text: str) -> TextDelta:
    return TextDelta(1, text, [], 0, None, None, 0, 0)


def test_order_and_failure_last() -> None:
    async def run() -> None:
        stream = DeltaStream()
        reader = asyncio.ensure_future(stream.get())
        await asyncio.sleep(0)
        stream.push(delta("a"))
        stream.push(delta("b"))
        stream.fail(EngineDeadError("first"))
        stream.fail(EngineDeadError("second"))
        assert (await reader).text == "a"
        assert (await stream.get()).text == "b"
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="first"):
                await stream.get()

    asyncio.run(run())


def test_cancelled_reader_loses_nothing() -> None:
    async def run() -> None:
        stream = DeltaStream()
        reader = asyncio.ensure_future(stream.get())
        await asyncio.sleep(0)
        stream.push(delta("a"))
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        assert (await stream.get()).text == "a"

    asyncio.run(run())
