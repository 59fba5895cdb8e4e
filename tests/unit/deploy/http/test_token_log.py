"""Tokens that are kept beside their requests: what is written, when, and what reading on does."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.http.records import token_log
from deploy.http.records.sqlite_store import SqliteStore
from deploy.http.records.store import Record
from deploy.http.records.token_log import AnswerTokens, TokenLog, read_tokens
from engine.errors import RequestError
from tests.support import kept_server
from tests.support.kept_server import Server, options

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 40,
    "request_id": "r",
    "stream": True,
}


def record(name: str = "r") -> Record:
    return Record(
        id=name,
        owner="",
        endpoint="e",
        request_id=name,
        seed=1,
        created=1,
        digest="d",
        body=b"b",
    )


@given(seed=st.integers(0, 2**32))
@settings(max_examples=100)
def test_writers_may_write_the_same(seed: int) -> None:
    """What several processes wrote is together what each had, whatever one of them began with."""
    rng = random.Random(seed)
    whole = [[rng.randrange(2**17) for _ in range(rng.randrange(12))] for _ in range(3)]
    data = b""
    ends = [0, 0, 0]
    writers = [AnswerTokens(record(), 3, ())]
    had = [[0, 0, 0]]
    for _ in range(rng.randrange(12)):
        if rng.random() < 0.3:
            known = read_tokens(data, 3)
            writers.append(AnswerTokens(record(), 3, known))
            had.append([0, 0, 0])
        at = rng.randrange(len(writers))
        for index in range(3):
            until = rng.randint(had[at][index], len(whole[index]))
            writers[at].add(index, whole[index][had[at][index] : until])
            had[at][index] = until
        if rng.random() < 0.7:
            data += writers[at].take()
            ends = list(map(max, ends, had[at]))
            assert read_tokens(data, 3) == [ids[:end] for ids, end in zip(whole, ends, strict=True)]


def test_what_lies_behind_a_gap_is_left_out() -> None:
    def piece(*numbers: int) -> bytes:
        return np.asarray(numbers, "<i4").tobytes()

    data = piece(0, 0, 2, 5, 6) + piece(0, 3, 1, 8) + piece(1, 0, 1, 9) + piece(7, 0, 1, 1)
    assert read_tokens(data, 2) == [[5, 6], [9]]
    assert read_tokens(data + piece(0, 2, 1, 7), 2) == [[5, 6, 7], [9]]
    assert read_tokens(b"", 1) == [[]]


def test_one_write_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only of what is new; what couldn't be written is written later."""
    monkeypatch.setattr(token_log, "PERIOD_S", 0.01)
    store = SqliteStore(tmp_path / "r", 3600.0, 1 << 24)
    calls: list[list[str]] = []
    fails = False

    async def add_tokens(news: Sequence[tuple[Record, bytes]], age_s: float | None) -> None:
        calls.append([one.id for one, _ in news])
        if fails:
            raise RequestError("away", status=503)
        await SqliteStore.add_tokens(store, news)

    monkeypatch.setattr(store, "add_tokens", add_tokens)

    async def scenario() -> None:
        nonlocal fails
        log = TokenLog(store)
        answers = [AnswerTokens(record(name), 1, ()) for name in "abc"]
        for answer in answers:
            await store.add(answer.record)
            log.open(answer)
            answer.add(0, [1, 2])
        await asyncio.sleep(0.1)
        assert [sorted(names) for names in calls] == [["a", "b", "c"]]
        fails = True
        answers[0].add(0, [3])
        while len(calls) < 2:
            await asyncio.sleep(0.01)
        store.note_away()
        number = len(calls)
        await asyncio.sleep(0.05)
        assert len(calls) == number, "a store that is away is left alone"
        monkeypatch.setattr(store, "_away_until", 0.0)
        fails = False
        await log.close(answers[0])
        assert read_tokens(await store.tokens_of(answers[0].record), 1) == [[1, 2, 3]]
        log.stop()
        assert len(log) == 0
        await store.close()

    asyncio.run(scenario())


async def seen(server: Server, last: str = "") -> list[str]:
    headers = {"accept": "text/event-stream", **({"last-event-id": last} if last else {})}
    reply = await server.http.get(f"{CHAT}/chatcmpl-r", params={"stream": "true"}, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.text.split("\n\n")[:-1]


def test_what_is_known_isnt_computed_again(tmp_path: Path) -> None:
    """But for the last token of each sequence; nor by another process."""

    async def scenario(server: Server) -> None:
        client = server.client
        client.script = None
        accept = {"accept": "text/event-stream"}
        for n in (1, 3):
            body = {**BODY, "n": n, "seed": 5}
            whole = (await server.http.post(CHAT, json=body, headers=accept)).text
            client.hang_at, client.num_computed = 30, 0
            reading = asyncio.create_task(server.http.post(CHAT, json=body, headers=accept))
            async with asyncio.timeout(20):
                while client.num_computed < 30 * n:
                    await asyncio.sleep(0.01)
            reading.cancel()  # its client leaves: what it had is written
            await asyncio.gather(reading, return_exceptions=True)
            client.hang_at, client.num_computed = None, 0
            events = whole.split("\n\n")[:-1]
            assert sorted(map(_said, await seen(server))) == sorted(map(_said, events))
            assert client.num_computed == 11 * n
            async with kept_server.serve(options(tmp_path)) as other:
                other.client.script = None
                reply = await other.http.get(f"{CHAT}/chatcmpl-r")
                assert reply.json()["usage"]["completion_tokens"] == 40 * n
                assert other.client.num_computed == 11 * n
        body = {**BODY, "logprobs": True}  # which tokens don't tell
        await server.http.post(CHAT, json=body)
        client.num_computed = 0
        assert "logprobs" in (await seen(server))[3]
        assert client.num_computed == 40

    kept_server.run(options(tmp_path), scenario)


def test_a_process_that_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leaves what it wrote until then."""
    monkeypatch.setattr(token_log, "PERIOD_S", 0.01)

    async def scenario(server: Server) -> None:
        server.client.script, server.client.hang_at = None, 25
        reading = asyncio.create_task(server.http.post(CHAT, json=BODY))
        store = SqliteStore(tmp_path / "store" / "records.sqlite3", 3600.0, 1 << 24)
        async with asyncio.timeout(20):
            found: list[list[int]] = [[]]
            while len(found[0]) < 25:
                await asyncio.sleep(0.02)
                try:
                    kept = await store.get("chatcmpl-r", "")
                except RequestError:
                    continue
                found = read_tokens(await store.tokens_of(kept), 1)
        await store.close()
        async with kept_server.serve(options(tmp_path)) as other:
            other.client.script = None
            events = await seen(other)
            assert other.client.num_computed == 40 - 24
            assert json.loads(_data(events[-2])[6:])["choices"][0]["finish_reason"] == "length"
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    kept_server.run(options(tmp_path), scenario)


def _said(event: str) -> str:
    """What an event has, but for the second in which its request came."""
    return re.sub(r'"created":\d+', "", _data(event))


def _data(event: str) -> str:
    return "\n".join(line for line in event.split("\n") if not line.startswith("id: "))
