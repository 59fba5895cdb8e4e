"""`ask_all`: a question to every replica of a deployment."""

from __future__ import annotations

from typing import Any

from ray.serve.exceptions import RayServeException

from engine.errors import EngineDeadError


async def ask_all(handle: Any, method: str, timeout_s: float, *args: Any) -> list[Any]:
    """Answers of every replica of a deployment; where a call fails, its exception instead. Raises
    `EngineDeadError` if a replica doesn't answer or there is none."""
    asked = handle.broadcast(method, *args)
    try:
        answers: list[Any] = await asked.results_async(timeout_s=timeout_s, return_exceptions=True)
    except (TimeoutError, RayServeException) as error:
        raise EngineDeadError(f"no answer to {method}: {type(error).__name__}") from error
    return answers
