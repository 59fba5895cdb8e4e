"""`Server`: the HTTP application on uvicorn, over a client that invents its tokens."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from deploy.http.api import build_api
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.options import ServerOptions
from tests.support.fake_client import FakeEngineClient


class Server:
    """The application on uvicorn in a thread."""

    def __init__(
        self,
        client: FakeEngineClient,
        settings: ApiSettings | None = None,
        layer: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ) -> None:
        """`layer` wraps the application."""
        self.client = client
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        settings = settings or ApiSettings(
            ServerOptions(max_body_bytes=2**20, stream_stall_timeout_s=0.5)
        )
        app = layer(build_api(lambda: ServedModels(client), settings))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[self.socket]))
        )

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self.socket.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
