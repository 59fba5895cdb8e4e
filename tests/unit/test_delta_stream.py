"""DeltaStream: order, wake-ups, failure after what is already there, bounded waiting."""

from __future__ import annotations

import asyncio

import pytest

from deploy.delta_stream import MAX_WAITING, DeltaStream, join
from engine.errors import EngineDeadError
from engine.tokenizer.detokenizer_manager import LogprobEntry, TextDelta


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
        assert [d.text for d in await reader] == ["a", "b"]
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
        assert [d.text for d in await stream.get()] == ["a"]

    asyncio.run(run())


def test_slow_reader_gets_deltas_joined() -> None:
    async def run() -> None:
        stream = DeltaStream()
        count = 3 * MAX_WAITING + 5
        for i in range(count):
            entry = LogprobEntry(str(i), i, -1.0, [], [], i) if i % 2 else None
            piece = TextDelta(1, f"{i} ", [i], i + 1, None, None, 7, 3, entry and [entry])
            if i == 0:
                piece.prompt_logprobs = [None]
            if i + 1 == count:
                piece.finish_reason, piece.stop_reason = "stop", "x"
            stream.push(piece)
            assert len(stream) <= MAX_WAITING
        got = await stream.get()
        assert "".join(d.text for d in got) == "".join(f"{i} " for i in range(count))
        assert [t for d in got for t in d.token_ids] == list(range(count))
        entries = [e.token_id for d in got for e in d.logprobs or []]
        assert entries == list(range(1, count, 2))
        given = 0
        for d in got:
            given += len(d.token_ids)
            assert (d.num_output, d.num_prompt, d.num_cached) == (given, 7, 3)
        assert [d.prompt_logprobs for d in got] == [[None]] + [None] * (len(got) - 1)
        last = got[-1]
        assert (last.finish_reason, last.stop_reason) == ("stop", "x")
        assert all(d.finish_reason is None for d in got[:-1])

    asyncio.run(run())


def test_joined_error_keeps_its_words() -> None:
    end = delta("b")
    end.finish_reason, end.error, end.error_status = "error", "too late", 408
    joined = join([delta("a"), end])
    assert (joined.text, joined.error, joined.error_status) == ("ab", "too late", 408)
