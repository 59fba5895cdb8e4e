"""Who gets whose answer, by a clock that the test sets."""

from __future__ import annotations

import asyncio

import pytest

from engine.process.shared_answer import SharedAnswer

FRESH_S = 0.5


class Question:
    """Answers with the number of times that it was asked, once `may_answer` is set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None
        self._shared = SharedAnswer[int](FRESH_S, lambda: self.now)

    async def _ask(self) -> int:
        self.asked += 1
        number = self.asked
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return number

    def get(self) -> asyncio.Task[int]:
        return asyncio.ensure_future(self._shared.get(self._ask))


def test_an_answer_is_given_again_until_it_is_old() -> None:
    async def run() -> None:
        question = Question()
        question.may_answer.set()
        assert await question.get() == 1
        question.now += FRESH_S
        assert await question.get() == 1
        question.now += 0.01
        assert await question.get() == 2
        assert question.asked == 2

    asyncio.run(run())


def test_who_asks_meanwhile_waits_however_long_it_takes() -> None:
    async def run() -> None:
        question = Question()
        early = question.get()
        await asyncio.sleep(0)
        question.now += 10 * FRESH_S
        late = question.get()
        await asyncio.sleep(0)
        question.may_answer.set()
        assert await asyncio.gather(early, late) == [1, 1]

    asyncio.run(run())


def test_one_who_leaves_does_not_end_the_question() -> None:
    async def run() -> None:
        question = Question()
        first, second = question.get(), question.get()
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        question.may_answer.set()
        assert await second == 1 and first.cancelled()

    asyncio.run(run())


def test_an_error_is_an_answer() -> None:
    async def run() -> None:
        question = Question()
        question.error = RuntimeError("gone")
        question.may_answer.set()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="gone"):
                await question.get()
        question.error = None
        question.now += FRESH_S + 0.01
        assert await question.get() == 2

    asyncio.run(run())
