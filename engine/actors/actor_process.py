"""`ActorProcess`: the operating system's side of an actor, to end one that hangs."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle

logger = logging.getLogger(__name__)


class ActorProcess(NamedTuple):
    """Where an actor runs. `started` shows whether a later process got the same id."""

    node_id: str
    pid: int
    started: int

    @classmethod
    def of_this_actor(cls) -> ActorProcess:
        """The process of the actor that calls this."""
        pid = os.getpid()
        return cls(this_node(), pid, started_at(pid))

    def kill(self, actor: ActorHandle[Any]) -> None:
        """End the actor even if it is stopped (SIGSTOP).

        `ray.kill` alone does that too, but only after 5 s, when the raylet gives up waiting
        (Ray 2.60, measured). For a process on another node there is only `ray.kill`.
        """
        if self.node_id == this_node() and started_at(self.pid) == self.started:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("process %d ended by itself", self.pid)
        ray.kill(actor)


def this_node() -> str:
    """Ray's id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def started_at(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0 where the kernel doesn't tell (no /proc)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
