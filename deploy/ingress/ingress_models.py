"""`IngressModels`: the models that one ingress serves, each behind its client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.http.engine_client import PlainFamily
from deploy.http.served_models import ServedModels
from deploy.ingress.serve_client import IngressOptions, ServeEngineClient


class IngressModels(ServedModels):
    """One per ingress replica."""

    def __init__(self, *clients: ServeEngineClient) -> None:
        super().__init__(*clients)
        self._started = clients

    @classmethod
    async def create(
        cls, engines: Sequence[Any], ingresses: Any, options: Sequence[IngressOptions]
    ) -> IngressModels:
        """Make and start the clients of this process, one for each of `options`. `engines` are
        Serve's handles of the models' engines, `ingresses` that of the ingresses. Raises the error
        that keeps a tokenizer from starting."""
        clients: list[ServeEngineClient] = []
        try:
            for handle, of_model in zip(engines, options, strict=True):
                clients.append(await ServeEngineClient.create(handle, ingresses, of_model))
        except BaseException:
            cls(*clients).stop()
            raise
        made = ServedModels.current = cls(*clients)
        return made

    def stop(self) -> None:
        """Stop all clients."""
        for client in self._started:
            client.stop()

    def check(self) -> None:
        """Serve's health checks call this. Raises `EngineDeadError` if a tokenizer can't start."""
        for client in self._started:
            client.check()

    def abort_here(self, request_id: str | None, owner: str | None) -> None:
        """As `EngineClient.abort_here`, for all models."""
        for client in self._started:
            client.abort_here(request_id, owner)

    def tell_metrics(self, asker: str, number: int, report: list[PlainFamily]) -> str:
        """As `ServeEngineClient.tell_metrics`."""
        return self._started[0].tell_metrics(asker, number, report)
