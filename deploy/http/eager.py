"""Run a coroutine at once, as far as it goes without waiting: most never need a task.

What Python 3.12 calls eager tasks (`asyncio.eager_task_factory`), for 3.11.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any


def run_eagerly(coroutine: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """None if the coroutine has ended; if it waits for something, what is to be awaited for it to
    go on. Raises what the coroutine raises up to there."""
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return None
    return _rest(coroutine, waits_for)


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Passes between a coroutine that has begun and the task what they say to each other."""
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
