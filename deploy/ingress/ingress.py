"""`build_ingress`: Serve deployment with the HTTP API; several replicas may run."""

# No `from __future__ import annotations`: Ray Serve inspects the annotations.
import asyncio
import gc
from typing import Any

from ray import serve

from deploy.http.access.listening import check_listening
from deploy.http.api import build_api
from deploy.http.engine_client import SpendingReport
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.ingress.ingress_models import IngressModels
from deploy.ingress.serve_client import IngressOptions
from deploy.options import ServerOptions
from deploy.serve_state import serve_log
from deploy.serve_state.http_host import http_host


def build_ingress(settings: ApiSettings) -> Any:
    """The ingress class, ready for `serve.deployment`."""

    @serve.ingress(build_api(ServedModels.of_this_process, settings))
    class Ingress:
        def __init__(self, engines: list[Any], options: list[IngressOptions]) -> None:
            self._server = server = options[0].server
            serve_log.set_up(server.log_level, server.log_format)
            self._engines = engines
            self._options = options
            self._models: IngressModels | None = None

        async def check_health(self) -> None:
            # Serve calls this before the replica takes traffic: the first call starts the clients
            # in the loop that the handlers run in.
            if self._models is None:
                await asyncio.to_thread(_check_listening, self._server)
                here = serve.get_replica_context()
                ingresses = serve.get_deployment_handle(here.deployment, here.app_name)
                self._models = await IngressModels.create(self._engines, ingresses, self._options)
                if _state(self).runner is not None:
                    _state(self).runner.start()
                # Ray leaves a large heap. Collecting it later would delay all streams.
                gc.collect()
                gc.freeze()
            self._models.check()

        async def abort(self, request_id: str | None, owner: str | None) -> None:
            # Any ingress asks all of them: a request is in one, and nobody knows in which.
            if self._models is not None:
                self._models.abort_here(request_id, owner)

        async def metrics(self, asker: str, number: int) -> str | None:
            # The ingress that a scrape reaches asks all of them, itself too.
            if self._models is None:
                return None
            report = _state(self).metrics.report(self._models)
            return self._models.tell_metrics(asker, number, report)

        async def hear_spending(self, ingress: str, report: SpendingReport) -> None:
            # From the start: this ingress may get the key's next request.
            _state(self).quotas.hear(ingress, report)

        async def hear_adapters(self) -> None:
            # Another ingress has loaded or unloaded one.
            if self._models is not None:
                await self._models.refresh_adapters()

        async def __del__(self) -> None:
            if self._models is not None:
                self._models.stop()
            store = _state(self).store
            if store is not None:
                await _state(self).runner.stop()
                await store.close()
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
