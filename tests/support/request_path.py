"""Ingress, engine replica and scheduler in this process, to see which files a request executes."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import httpx
import pytest

from deploy.http.api import build_api
from deploy.ingress import engine_watch, tokenizer_link
from deploy.ingress.resume import ResumeLimits
from deploy.ingress.serve_client import IngressOptions, ServeEngineClient
from deploy.replica import engine_replica
from deploy.replica.engine_replica import EngineReplica
from engine.executor.message_executor import ReadyWorkers
from engine.protocol.messages import Pong, Shutdown
from engine.protocol.transport import Inbox, Outbox
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler_role import SchedulerRole
from engine.tokenizer.tokenizer_role import TokenizerRole

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
VOCAB = 256


class Files:
    """The project's files in which a function was called, in order of the first call."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self._on = False

    def install(self) -> None:
        """For this thread and those started from now on."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def remove(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def begin(self) -> None:
        self._on = True

    def end(self) -> None:
        self._on = False

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if self._on and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT / "engine") or path.is_relative_to(ROOT / "deploy"):
                self.found[str(path.relative_to(ROOT))] = None


class _Method:
    """`.remote(...)` of an actor or a Serve handle."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Replicas:
    """Serve's handle to one engine replica in this process."""

    def __init__(self, replica: EngineReplica) -> None:
        self._replica = replica
        self.generate = _Method(lambda *args: asyncio.ensure_future(replica.generate(*args)))

    def broadcast(self, method: str, *args: Any) -> Any:
        async def results_async(**_: Any) -> list[Any]:
            return [await getattr(self._replica, method)(*args)]

        return SimpleNamespace(results_async=results_async)


class TokenizerActor:
    """A `TokenizerRole` in a thread, with the methods of its actor."""

    def __init__(self, model_path: str) -> None:
        role = TokenizerRole(model_path, HOST)
        self._run: Future[None] = Future()
        self._thread = threading.Thread(target=role.run)
        described: Future[Any] = Future()
        described.set_result((role.address, SimpleNamespace(kill=lambda _: None)))
        self.describe = _Method(lambda: SimpleNamespace(future=lambda: described))
        self.run = _Method(self._start)
        self.pulse = _Method(lambda: asyncio.sleep(0, 0.0))

    def _start(self) -> Any:
        self._thread.start()
        return asyncio.get_running_loop().create_future()


def files_of_a_request(
    model_path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The project's files that a completion executes between its HTTP handler and
    `Scheduler.add`, in the processes that hold it in turn: ingress, engine replica, scheduler."""
    files, arrived = Files(), threading.Event()
    add = Scheduler.add

    def traced(self: Scheduler, *args: Any) -> None:
        files.end()
        files.found["engine/scheduler/scheduler.py"] = None
        arrived.set()
        add(self, *args)

    monkeypatch.setattr(Scheduler, "add", traced)
    monkeypatch.setattr(engine_watch, "PING_PERIOD_S", 1e6)
    monkeypatch.setattr(engine_replica, "INGRESS_LOOK_S", 1e6)
    monkeypatch.setattr(tokenizer_link, "RemoteTokenizerActor", _Method(TokenizerActor))
    monkeypatch.setattr(tokenizer_link.ray, "kill", lambda _: None)
    monkeypatch.setattr("deploy.ingress.serve_client.node_ip", lambda: HOST)
    monkeypatch.setattr(engine_replica, "node_ip", lambda: HOST)
    monkeypatch.setattr(engine_replica, "get_current_placement_group", lambda: None)
    pong = ("replica", "test", "node", 0, 0)
    monkeypatch.setattr(engine_replica, "_introduction", lambda inbox: Pong(inbox, *pong))

    files.install()
    inbox, results, worker = Inbox(HOST), Inbox(HOST), Inbox(HOST)
    config = SchedulerConfig(num_kv_tokens=256, max_model_len=64, vocab_size=VOCAB, page_size=4)
    role = SchedulerRole(config, inbox, ReadyWorkers([worker.address], 256), results)
    scheduler = threading.Thread(target=role.run, args=(lambda: "",))
    scheduler.start()

    async def started(*_: Any) -> None:
        return None

    async def run() -> None:
        group = SimpleNamespace(
            scheduler_address=inbox.address,
            start=started,
            death="",
            dead=asyncio.Event(),
            unwell="",
            stop=started,
        )
        monkeypatch.setattr(engine_replica, "EngineGroup", lambda *_: group)
        replica = EngineReplica({"model": model_path}, 1, "WARNING", 10.0, 1.0)
        options = IngressOptions(
            model_path, "m", 64, VOCAB, "WARNING", ResumeLimits(), 1e6, 1.0, "prefix_aware", 4
        )
        client = await ServeEngineClient.create(Replicas(replica), options)
        await asyncio.sleep(0.5)
        app = build_api(ServeEngineClient.current)
        for route in app.routes:
            if getattr(route, "path", "") == "/v1/completions":
                handler = route
        begin = handler.endpoint

        async def traced_handler(request: Any) -> Any:
            files.begin()
            return await begin(request)

        handler.dependant.call = traced_handler
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            call = asyncio.create_task(http.post("/v1/completions", json=body))
            try:
                async with asyncio.timeout(5):
                    while not arrived.is_set():
                        assert not call.done(), call.result().text
                        await asyncio.sleep(0.01)
            finally:
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
        client.stop()
        await replica.__del__()

    try:
        asyncio.run(run())
    finally:
        files.remove()
        Outbox(inbox.address).send(Shutdown())
        scheduler.join(10)
        worker.close()
    return list(files.found)
