"""Run a coroutine at once, as far as it goes without waiting. Most coroutines then need no task.

Python 3.12 has this as eager tasks (`asyncio.eager_task_factory`); Manta also runs on 3.11.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any


def run_eagerly(coroutine: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Run the coroutine to its first wait. Returns None if it has ended, else an awaitable that
    runs the rest. Raises what the coroutine raises before it first waits."""
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return None
    return _rest(coroutine, waits_for)


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Run the rest of a coroutine that waits for `waits_for`: hand each future that it waits for
    to the task that runs this generator, and hand the task's answer back to the coroutine."""
    try:
        while True:
            try:
                value = yield waits_for
            except BaseException as error:  # cancelled, or what was waited for failed
                waits_for = coroutine.throw(error)
            else:
                waits_for = coroutine.send(value)
    except StopIteration:
        return
