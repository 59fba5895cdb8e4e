"""`build_ingress`: Serve deployment with the HTTP API; several replicas may run."""

# No `from __future__ import annotations`: Ray Serve inspects the annotations.
import gc
from typing import Any

from ray import serve

from deploy.http.api import build_api
from deploy.http.settings import ApiSettings
from deploy.ingress.resume import ResumeLimits
from deploy.ingress.serve_client import RoutingOptions, ServeEngineClient
from deploy.serve_state import serve_log
from engine.errors import EngineDeadError


class _Holder:
    """The client of this process; set by the replica's constructor."""

    client: ServeEngineClient | None = None


def current_client() -> ServeEngineClient:
    """The client of this replica."""
    if _Holder.client is None:
        raise EngineDeadError("the server is still starting")
    return _Holder.client


def build_ingress(settings: ApiSettings) -> Any:
    """The ingress class, ready for `serve.deployment`."""

    @serve.ingress(build_api(current_client, settings))
    class Ingress:
        def __init__(
            self,
            engines: Any,
            model_path: str,
            name: str,
            max_model_len: int,
            vocab_size: int,
            log_level: str,
            limits: ResumeLimits,
            hang_timeout_s: float,
            drain_timeout_s: float,
            routing: RoutingOptions,
        ) -> None:
            serve_log.set_up(log_level)
            self._vocab_size = vocab_size
            self._client = ServeEngineClient(
                engines,
                model_path,
                name,
                max_model_len,
                limits,
                hang_timeout_s,
                drain_timeout_s,
                routing,
            )
            self._started = False

        async def check_health(self) -> None:
            # Serve calls this before the replica takes traffic: the first call starts the client
            # in the loop that the handlers run in.
            if not self._started:
                await self._client.start(self._vocab_size)
                _Holder.client = self._client
                # Ray leaves a large heap, whose collection would hold all streams up.
                gc.collect()
                gc.freeze()
                self._started = True
            self._client.check()

        async def __del__(self) -> None:
            if self._started:
                self._client.stop()

    return Ingress
