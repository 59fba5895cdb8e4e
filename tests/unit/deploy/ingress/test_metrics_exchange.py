"""What ingresses measured reaches the one that is asked, also if others hang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from deploy.ingress.metrics_exchange import MetricsExchange
from engine.errors import EngineDeadError
from engine.protocol.async_inbox import AsyncInbox

FAMILY = ("a_total", "counter", "Some.", "a_total 1.0\n")
LARGE = ("b_total", "counter", "Many.", "b_total 1.0\n" * 100_000)


class Ingress:
    """One of several, in this process."""

    def __init__(self, name: str, handle: Handle) -> None:
        self.name = name
        self.inbox = AsyncInbox("127.0.0.1", lambda message: self.exchange.take(message))
        self.exchange = MetricsExchange(handle, self.inbox.address)
        handle.ingresses.append(self)

    async def metrics(self, asker: str, number: int) -> str:
        self.exchange.answer(asker, number, self.name, [FAMILY, LARGE])
        return self.name

    def close(self) -> None:
        self.exchange.close()
        self.inbox.close()


class Handle:
    """Serve's handle: `states` says of ingresses by name that they hang or fail."""

    def __init__(self) -> None:
        self.ingresses: list[Ingress] = []
        self.states: dict[str, str] = {}
        self.error: Exception | None = None

    def broadcast(self, method: str, *args: Any) -> Asked:
        assert method == "metrics"
        if self.error is not None:
            raise self.error
        return Asked([partial(self._call, ingress, *args) for ingress in self.ingresses])

    async def _call(self, ingress: Ingress, asker: str, number: int) -> str | None:
        state = self.states.get(ingress.name, "")
        if state == "hangs":
            await asyncio.Event().wait()
        if state == "starts":
            return None
        if state == "fails":
            raise RuntimeError("it broke")
        return await ingress.metrics(asker, number)


@dataclass
class Asked:
    """What `broadcast` returns."""

    calls: list[Callable[[], Awaitable[str | None]]]

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        async with asyncio.timeout(timeout_s):
            asked = [call() for call in self.calls]
            return await asyncio.gather(*asked, return_exceptions=return_exceptions)


def run(test: Callable[[Handle, Ingress], Any]) -> None:
    async def main() -> None:
        handle = Handle()
        ingresses = [Ingress(name, handle) for name in "abc"]
        try:
            await test(handle, ingresses[0])
        finally:
            for ingress in ingresses:
                ingress.close()

    asyncio.run(main())


def test_all_answer() -> None:
    async def test(handle: Handle, first: Ingress) -> None:
        reports, *others = await asyncio.gather(*(first.exchange.gather(20.0) for _ in range(5)))
        assert reports.families == {name: [FAMILY, LARGE] for name in ("a", "b", "c")}
        assert reports.num_silent == 0
        assert others == [reports] * 4

    run(test)


@pytest.mark.parametrize("state", ["starts", "fails"])
def test_one_has_no_answer(state: str) -> None:
    async def test(handle: Handle, first: Ingress) -> None:
        handle.states["b"] = state
        reports = await first.exchange.gather(20.0)
        assert sorted(reports.families) == ["a", "c"] and reports.num_silent == 1

    run(test)


def test_the_others_are_heard_if_one_hangs() -> None:
    async def test(handle: Handle, first: Ingress) -> None:
        await first.exchange.gather(20.0)  # connects them
        handle.states["b"] = "hangs"
        reports = await first.exchange.gather(1.0)
        assert sorted(reports.families) == ["a", "c"] and reports.num_silent == 1

    run(test)


def test_late_answers_are_dropped() -> None:
    async def test(handle: Handle, first: Ingress) -> None:
        reports = await first.exchange.gather(20.0)
        assert sorted(reports.families) == ["a", "b", "c"]
        late = handle.ingresses[1].exchange
        late.answer(first.inbox.address, 0, "b", [FAMILY])
        late.answer(first.inbox.address, 0, "ghost", [FAMILY])
        again = await first.exchange.gather(20.0)  # messages of one sender keep their order
        assert again == reports

    run(test)


def test_serve_cannot_ask() -> None:
    async def test(handle: Handle, first: Ingress) -> None:
        handle.error = RayServeException("no replica")
        with pytest.raises(EngineDeadError, match="can't ask the ingresses"):
            await first.exchange.gather(1.0)

    run(test)


def test_connections_of_those_that_no_longer_ask_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(handle: Handle, first: Ingress) -> None:
        dropped: list[str] = []
        monkeypatch.setattr("deploy.ingress.metrics_exchange.FORGET_AFTER_S", -1.0)
        monkeypatch.setattr(first.exchange._outboxes, "drop", dropped.append)
        await first.exchange.gather(20.0)
        second = handle.ingresses[1]
        await second.exchange.gather(20.0)
        assert dropped == [first.inbox.address, second.inbox.address]

    run(test)
