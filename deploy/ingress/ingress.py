"""`build_ingress`: Serve deployment with the HTTP API; several replicas may run."""

# No `from __future__ import annotations`: Ray Serve inspects the annotations.
import asyncio
import gc
from typing import Any

from ray import serve

from deploy.http.access.listening import check_listening
from deploy.http.api import build_api
from deploy.http.engine_client import SpendingReport
from deploy.http.settings import ApiSettings
from deploy.ingress.serve_client import IngressOptions, ServeEngineClient
from deploy.options import ServerOptions
from deploy.serve_state import serve_log
from deploy.serve_state.http_host import http_host


def build_ingress(settings: ApiSettings) -> Any:
    """The ingress class, ready for `serve.deployment`."""

    @serve.ingress(build_api(ServeEngineClient.current, settings))
    class Ingress:
        def __init__(self, engines: Any, options: IngressOptions) -> None:
            serve_log.set_up(options.server.log_level, options.server.log_format)
            self._engines = engines
            self._options = options
            self._client: ServeEngineClient | None = None

        async def check_health(self) -> None:
            # Serve calls this before the replica takes traffic: the first call starts the client
            # in the loop that the handlers run in.
            if self._client is None:
                await asyncio.to_thread(_check_listening, self._options.server)
                here = serve.get_replica_context()
                ingresses = serve.get_deployment_handle(here.deployment, here.app_name)
                self._client = await ServeEngineClient.create(
                    self._engines, ingresses, self._options
                )
                # Ray leaves a large heap. Collecting it later would delay all streams.
                gc.collect()
                gc.freeze()
            self._client.check()

        async def abort(self, request_id: str | None, owner: str | None) -> None:
            # Any ingress asks all of them: a request is in one, and nobody knows in which.
            if self._client is not None:
                self._client.abort_here(request_id, owner)

        async def metrics(self, asker: str, number: int) -> str | None:
            # The ingress that a scrape reaches asks all of them, itself too.
            if self._client is None:
                return None
            return self._client.tell_metrics(asker, number, _state(self).metrics.report)

        async def hear_spending(self, ingress: str, report: SpendingReport) -> None:
            # From the start: this ingress may get the key's next request.
            _state(self).quotas.hear(ingress, report)

        async def hear_adapters(self) -> None:
            # Another ingress has loaded or unloaded one.
            if self._client is not None:
                await self._client.refresh_adapters()

        async def __del__(self) -> None:
            if self._client is not None:
                self._client.stop()
            tracing = _state(self).tracing
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    return Ingress


def _state(ingress: Any) -> Any:
    """The state of the API's application, which Serve gives the ingress as this process has it."""
    return ingress.app.state


def _check_listening(server: ServerOptions) -> None:
    """Once more: the application may have been built before Serve ran."""
    host = http_host()
    if host is not None:
        check_listening(server.api_keys_file, server.auth, host)
