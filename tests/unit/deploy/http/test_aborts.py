"""`until_aborted`: an abort ends the work and nothing else; nothing else looks like an abort."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from deploy.http.aborts import Abort
from deploy.http.generation.plan import until_aborted
from tests.support.fake_client import FakeEngineClient


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await work

    asyncio.run(limited())


async def ends_in(steps: int, log: list[str]) -> None:
    try:
        for _ in range(steps):
            await asyncio.sleep(0)
        log.append("done")
    finally:
        log.append("left")


@pytest.mark.parametrize("at", range(12))
def test_an_abort_at_any_moment(at: int) -> None:
    """The work is done, or it isn't and was aborted; the task goes on either way."""

    async def check() -> None:
        abort, log = Abort(), list[str]()
        task = asyncio.create_task(until_aborted(abort, ends_in(6, log)))
        for _ in range(at):
            await asyncio.sleep(0)
        abort.set()
        abort.set()
        was_aborted = await task
        assert was_aborted == ("done" not in log)
        assert at > 0 or log == [], "it doesn't begin"
        assert abort.scopes == set()
        await asyncio.sleep(0)

    run(check())


def test_a_timeout_of_the_work_is_its_own() -> None:
    async def work() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    async def check() -> None:
        with pytest.raises(TimeoutError):
            await until_aborted(Abort(), work())

    run(check())


@pytest.mark.parametrize("first", ["abort", "cancel"])
def test_a_client_that_leaves_at_the_same_time(first: str) -> None:
    async def check() -> None:
        abort, log = Abort(), list[str]()
        task = asyncio.create_task(until_aborted(abort, ends_in(1000, log)))
        await asyncio.sleep(0)
        for action in (abort.set, task.cancel) if first == "abort" else (task.cancel, abort.set):
            action()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["left"]

    run(check())


def test_all_copies_end() -> None:
    async def check() -> None:
        abort, log = Abort(), list[str]()
        copies = [asyncio.create_task(until_aborted(abort, ends_in(1000, log))) for _ in range(3)]
        await asyncio.sleep(0)
        abort.set()
        assert await asyncio.gather(*copies) == [True] * 3
        assert await until_aborted(abort, ends_in(1, log))
        assert log == ["left"] * 3

    run(check())


def test_ids_are_compared_as_a_whole() -> None:
    async def check() -> None:
        client = FakeEngineClient()
        aborts = [Abort(frozenset(ids)) for ids in (("a",), ("ab", "b"), ("b",))]
        client.aborts.update(aborts)
        client.abort_here("a")
        assert [abort.is_set for abort in aborts] == [True, False, False]
        client.abort_here("b")
        assert [abort.is_set for abort in aborts] == [True, True, True]
        last = Abort(frozenset(("c",)))
        client.aborts.add(last)
        client.abort_here(None)
        assert last.is_set

    run(check())
