"""What an endpoint that generates must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from deploy.http.engine_client import EngineClient
from deploy.http.metrics import RequestTracker
from deploy.http.openai.generation import Generation


class Endpoint(ABC):
    """From the body of a request to a generation; stateless, so it can be shipped to replicas."""

    name: ClassVar[str]
    """In metrics."""

    @abstractmethod
    async def prepare(
        self, client: EngineClient, body: bytes, request_id: str, tracker: RequestTracker
    ) -> Generation:
        """Check, tokenize, plan. Raises `RequestError`; nothing runs yet."""
