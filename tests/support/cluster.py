"""A running Manta whose processes are killed and stopped."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import yaml

from benchmarks.servers import ManagedServer
from deploy.start.processes import marked_processes
from deploy.start.target import load_target
from tests.support.processes import actor_pids, find_program, launch_mark

ROLES = {
    "worker": "WorkerActor",
    "scheduler": "SchedulerActor",
    "tokenizer": "TokenizerActor",
    "replica": "ServeReplica:llm:engine",
}
INGRESS = "ServeReplica:llm:ingress"
POLL_S = 0.1
ROOT = Path(__file__).resolve().parents[2]

_DEPLOY = """
import sys, yaml, ray
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
config = ServeDeploySchema.model_validate(yaml.safe_load(sys.stdin))
_get_global_client().deploy_apps(config)
"""


class Struck(NamedTuple):
    """Times of one strike: seconds until /health reported it, and until all was well again."""

    role: str
    how: str
    at: float
    ill_s: float | None
    strong_s: float


class Cluster:
    """Strikes at roles of a server that has `num_replicas` engines of `world_size` workers."""

    def __init__(
        self,
        server: ManagedServer,
        config: str,
        num_replicas: int,
        world_size: int = 1,
        **args: Any,
    ) -> None:
        self.url = server.base_url
        self.mark = launch_mark(server.pid)
        self._config = config
        self._args = args
        self._rng = random.Random(7)
        self.num_replicas = num_replicas
        self._world_size = world_size

    @property
    def expected(self) -> dict[str, int]:
        """Processes by role at full strength."""
        n = self.num_replicas
        return {"worker": n * self._world_size, "scheduler": n, "tokenizer": 1, "replica": n}

    def pids(self, role: str) -> list[int]:
        """Processes of a role now."""
        return actor_pids(self.mark, ROLES[role])

    async def strike(self, role: str, how: str, limit_s: float, pid: int | None = None) -> Struck:
        """ "kill" or "hang" one process of `role`, or `pid` of it; wait until all is well again,
        for `limit_s`."""
        pid = pid or self._rng.choice(self.pids(role))
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        async with aiohttp.ClientSession() as session:
            ill = await self._until(session, lambda status: status != 200, at + 5.0)
            gone = f"{role} {pid} after a {how}"
            while True:
                well = await self._until(session, lambda status: status == 200, at + limit_s)
                assert well is not None, f"{gone}: not well after {limit_s:.0f} s"
                if pid not in marked_processes(self.mark) and self.is_complete():
                    return Struck(role, how, at, None if ill is None else ill - at, well - at)
                assert time.monotonic() < at + limit_s, f"{gone}: {self.counts()}"
                await asyncio.sleep(POLL_S)

    def counts(self) -> dict[str, int]:
        """Number of processes by role now."""
        return {role: len(self.pids(role)) for role in ROLES}

    def is_complete(self) -> bool:
        """Whether every role has exactly its number of processes."""
        return self.counts() == self.expected

    async def wait_complete(self, limit_s: float) -> None:
        """Wait for /health 200 with every role complete."""
        deadline = time.monotonic() + limit_s
        async with aiohttp.ClientSession() as session:
            while not (
                await self._until(session, lambda status: status == 200, deadline)
                and self.is_complete()
            ):
                assert time.monotonic() < deadline, f"{self.counts()} after {limit_s:.0f} s"
                await asyncio.sleep(POLL_S)

    def deploy(self, num_replicas: int | None = None, **args: Any) -> None:
        """Change the running application as `serve deploy` would: replicas, or its `args`."""
        self._args |= args
        overrides = [f"{key}={value}" for key, value in self._args.items()]
        port = int(self.url.rpartition(":")[2])
        config = load_target(str(ROOT / self._config), overrides, port=port).config
        if num_replicas is not None:
            self.num_replicas = num_replicas
        # The number isn't set in args: that would be a new version of the whole application.
        config["applications"][0]["deployments"] = [
            {"name": "engine", "num_replicas": self.num_replicas}
        ]
        raylet = find_program(self.mark, "raylet")
        auth = {k: v for k, v in raylet.environment.items() if k.startswith("RAY_AUTH")}
        subprocess.run(
            [sys.executable, "-c", _DEPLOY, raylet.options["gcs-address"]],
            input=yaml.safe_dump(config),
            text=True,
            cwd=ROOT,
            env={**os.environ, **auth},
            check=True,
            timeout=180,
        )

    async def _until(
        self,
        session: aiohttp.ClientSession,
        wanted: Callable[[int | None], bool],
        deadline: float,
    ) -> float | None:
        """When /health first had a `wanted` status (None: no answer); None if it never did."""
        while True:
            try:
                async with session.get(f"{self.url}/health", timeout=_TIMEOUT) as reply:
                    status: int | None = reply.status
            except (aiohttp.ClientError, TimeoutError):
                status = None
            if wanted(status):
                return time.monotonic()
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(POLL_S)


_TIMEOUT = aiohttp.ClientTimeout(total=10)
