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
from fastapi import FastAPI, Request, Response

from deploy.http.api import build_api
from deploy.http.generation.endpoint import Endpoint
from deploy.http.served_models import ServedModels
from deploy.ingress import engine_watch, serve_client, tokenizer_link
from deploy.ingress.engine_watch import EngineWatch
from deploy.ingress.ingress_models import IngressModels
from deploy.ingress.serve_client import IngressOptions
from deploy.options import ServerOptions
from deploy.replica import engine_replica
from deploy.replica.engine_replica import EngineReplica
from engine.actors import role_watch
from engine.config import EngineConfig
from engine.executor.message_executor import ReadyWorkers
from engine.loop.scheduler_role import SchedulerRole
from engine.protocol.messages import AddRequest, Pong, Shutdown
from engine.protocol.transport import Inbox, Outbox
from engine.scheduler.scheduler import Scheduler
from engine.tokenizer.tokenizer_role import TokenizerRole
from tests.support.model_info import model_info
from tests.support.scheduler_configs import scheduler_config

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
VOCAB = 256


class ExecutedFiles:
    """The project's files in which a function was called while this was on.

    This thread counts, and threads that are started while it is installed.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.is_on = False

    def __enter__(self) -> ExecutedFiles:
        threading.setprofile(self.on_event)
        sys.setprofile(self.on_event)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call":
            self.add(frame.f_code.co_filename)

    def add(self, name: str) -> None:
        path = Path(name)
        if path.is_relative_to(ROOT / "engine") or path.is_relative_to(ROOT / "deploy"):
            self.found.add(str(path.relative_to(ROOT)))


class _Method:
    """`.remote(...)` of an actor or of a Serve handle."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class _Handle:
    """Serve's handle to one engine replica, which runs in this process."""

    def __init__(self, replica: EngineReplica) -> None:
        self._replica = replica
        self.generate = _Method(lambda *args: asyncio.ensure_future(replica.generate(*args)))

    def broadcast(self, method: str, *args: Any) -> Any:
        async def results_async(**_: Any) -> list[Any]:
            return [await getattr(self._replica, method)(*args)]

        return SimpleNamespace(results_async=results_async)


class _TokenizerActor:
    """A `TokenizerRole` in a thread, with the methods of its actor."""

    def __init__(self, model_path: str, _: str = "text") -> None:
        self._role = TokenizerRole(model_path, HOST)
        self._thread = threading.Thread(target=self._work)
        described: Future[Any] = Future()
        described.set_result((self._role.address, SimpleNamespace(kill=lambda _: None)))
        self.describe = _Method(lambda: SimpleNamespace(future=lambda: described))
        self.run = _Method(self._start)
        self.pulse = _Method(lambda: asyncio.sleep(0, 0.0))

    def _work(self) -> None:
        sys.setprofile(None)  # not on the request's way to the scheduler
        self._role.run()

    def _start(self) -> Any:
        self._thread.start()
        return asyncio.get_running_loop().create_future()


class _Group:
    """An `EngineGroup` that is a scheduler's inbox."""

    death = unwell = ""

    def __init__(self, scheduler_address: str) -> None:
        self.scheduler_address = scheduler_address
        self.dead = asyncio.Event()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def files_of_a_request(
    model_path: str, body: dict[str, Any], routing_policy: str, monkeypatch: pytest.MonkeyPatch
) -> set[str]:
    """The project's files that a completion executes from its HTTP handler to `Scheduler.add`.

    These count: the ingress until it calls the replica, the replica until it sends to the
    scheduler, the scheduler until `add`. Work beside that doesn't count: pings, the tokenizer's
    thread, the message that the replica took the request.
    """
    files, arrived = ExecutedFiles(), threading.Event()
    add, send = Scheduler.add, Outbox.send

    def add_and_end(self: Scheduler, *args: Any) -> None:
        files.is_on = False
        files.found.add("engine/scheduler/scheduler.py")
        arrived.set()
        add(self, *args)

    def send_to_scheduler(self: Outbox, message: Any) -> None:
        # In one process the ingress' loop would run beside the scheduler's thread.
        send(self, message)
        if isinstance(message, AddRequest):
            sys.setprofile(None)

    async def handle(self: Endpoint, request: Request) -> Response:
        files.is_on = True
        return await begin(self, request)

    def hear(self: EngineWatch, *args: Any) -> None:
        heard.append(None)
        hear_of(self, *args)

    heard: list[None] = []
    begin, hear_of = Endpoint.handle, EngineWatch.heard
    monkeypatch.setattr(EngineWatch, "heard", hear)
    monkeypatch.setattr(Scheduler, "add", add_and_end)
    monkeypatch.setattr(Outbox, "send", send_to_scheduler)
    monkeypatch.setattr(Endpoint, "handle", handle)
    for module, name in (
        (engine_watch, "PING_PERIOD_S"),
        (role_watch, "PING_PERIOD_S"),
        (role_watch, "LOOK_PERIOD_S"),
    ):
        monkeypatch.setattr(module, name, 1e6)
    for module in (serve_client, engine_replica):
        monkeypatch.setattr(module, "node_ip", lambda: HOST)
    placed = SimpleNamespace(options=lambda **_: _Method(_TokenizerActor))
    monkeypatch.setattr(tokenizer_link, "RemoteTokenizerActor", placed)
    monkeypatch.setattr(tokenizer_link, "this_node", lambda: "a" * 56)
    monkeypatch.setattr(tokenizer_link.ray, "kill", lambda _: None)
    monkeypatch.setattr(engine_replica, "get_current_placement_group", lambda: None)
    monkeypatch.setattr(engine_replica, "EngineGroup", lambda *_: _Group(inbox.address))
    pong = ("actor", "test", "node", 0, 0)
    monkeypatch.setattr(engine_replica, "_introduction", lambda inbox: Pong(inbox, *pong))

    async def run() -> None:
        server = ServerOptions(log_level="WARNING", hang_timeout_s=1e6, drain_timeout_s=1.0)
        replica = EngineReplica(EngineConfig(model=model_path), 1, server)
        info = model_info("m", 64, VOCAB, path=model_path, page_size=4)
        options = IngressOptions(server, info, routing_policy)
        models = await IngressModels.create([_Handle(replica)], None, [options])
        # The replica introduces itself and answers the ping that this starts; both are done.
        await _until(lambda: len(heard) >= 2)
        try:
            each = []
            for _ in range(3):
                files.found = set()
                arrived.clear()
                sys.setprofile(files.on_event)
                await _request(build_api(ServedModels.of_this_process), body, arrived)
                await _until(lambda: not len(replica._open))
                each.append(files.found)
            # What some loop does now and then isn't in all of them.
            files.found = set.intersection(*each)
        finally:
            models.stop()
            await replica.__del__()

    inbox, results, worker = Inbox(HOST), Inbox(HOST), Inbox(HOST)
    config = scheduler_config(num_kv_tokens=256, max_model_len=64, vocab_size=VOCAB, page_size=4)
    role = SchedulerRole(config, inbox, ReadyWorkers([worker.address], 256), results)
    scheduler = threading.Thread(target=role.run, args=(lambda: "",))
    with files:
        scheduler.start()
        try:
            asyncio.run(run())
        finally:
            send(Outbox(inbox.address), Shutdown())
            scheduler.join(10)
            worker.close()
    assert not scheduler.is_alive()
    return files.found


async def _request(app: FastAPI, body: dict[str, Any], arrived: threading.Event) -> None:
    """Post a completion, and leave once the scheduler has it."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        await _until(lambda: arrived.is_set() or call.done())
        assert not call.done(), call.result().text
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def _until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
