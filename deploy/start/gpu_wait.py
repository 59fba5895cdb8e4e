"""Waiting, for a stated time, for a cluster that has the GPUs of one engine."""

# No `from __future__ import annotations`: imported by the module with Serve's builder.
import logging
import os
import time
from collections.abc import Callable

from deploy.start.processes import MARK
from engine.actors.cluster_gpus import gpu_shortage
from engine.config import EngineConfig
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

POLL_S = 1.0
REMIND_S = 30.0


def wait_for_gpus(
    engine: EngineConfig,
    wait_s: float | None,
    nodes: Callable[[], list[int]],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[int]:
    """GPUs of each node, once they hold one engine. Raises `ConfigError` after `wait_s` seconds.

    With `wait_s` None it doesn't wait, and Ray places the engine when it can. That is for clusters
    that add nodes only when a placement group asks for them.
    """
    started = clock()
    reminded = -REMIND_S
    while True:
        found = nodes()
        shortage = gpu_shortage(engine.tp_size, engine.pp_size, found)
        waited = clock() - started
        if not shortage or wait_s is None:
            if shortage:
                logger.warning("%s. Waiting until Ray can place it", shortage)
            return found
        if waited >= wait_s:
            raise ConfigError(f"{shortage}, or wait longer with gpu_wait_s (now {wait_s:g}).")
        if waited - reminded >= REMIND_S:
            reminded = waited
            logger.warning("%s. Waiting %.0f s more for nodes", shortage, wait_s - waited)
        sleep(POLL_S)


def patience(wait_s: float | None) -> float | None:
    """`gpu_wait_s`, but 0 on a cluster that the launcher started for itself, which can't grow."""
    return 0.0 if MARK in os.environ else wait_s
