"""Parts that all benchmarks share: where they ran, how a table prints, how a run ends."""

from __future__ import annotations

from pathlib import Path

from benchmarks.load.output import environment, finish, percentiles, print_table, save_result

__all__ = [
    "PEERS",
    "REPO_ROOT",
    "StolenTime",
    "completion_body",
    "environment",
    "finish",
    "percentiles",
    "print_table",
    "save_result",
]
REPO_ROOT = Path(__file__).resolve().parents[1]
PEERS = REPO_ROOT / ".peers"
"""Environments and models of other engines; git ignores it."""


def completion_body(prompt: list[int], max_tokens: int, **more: object) -> dict[str, object]:
    """A streaming request to `/v1/completions` for exactly `max_tokens` tokens, with usage."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


class StolenTime:
    """The share of CPU time that the machine's host has given to others since this was made."""

    def __init__(self) -> None:
        self._before = _cpu_ticks()

    @property
    def share(self) -> float:
        """The share, 0 to 1; 0 if the system doesn't tell."""
        stolen, every = (a - b for a, b in zip(_cpu_ticks(), self._before, strict=True))
        return stolen / every if every else 0.0


def _cpu_ticks() -> tuple[int, int]:
    """(stolen ticks, all ticks) of all cores since boot."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return 0, 0
    # user nice system idle iowait irq softirq steal; guest time is in user already
    ticks = [int(value) for value in first.split()[1:9]]
    return ticks[7], sum(ticks)
