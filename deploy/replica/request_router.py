"""`ChosenReplicaRouter`: a router for Serve that obeys the choice that a call carries."""

# No `from __future__ import annotations`: Ray Serve may inspect the annotations.
import logging
import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

logger = logging.getLogger(__name__)

CHOICE_ARGUMENT = 2
"""Position of the choice in the arguments of `EngineReplica.generate`."""


class ChosenReplicaRouter(RequestRouter):
    """Chooses the replica whose actor the call's third argument names, if Serve would use it; else
    the less busy of two others.

    The choice itself is made where the prompt, the caches and the loads are known
    (`deploy.ingress.replica_router`). Each request is fulfilled by its own choice, never in order
    (Serve's `FIFOMixin` would swap requests).
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the chosen one first. Never raises: Serve would let the request
        hang."""
        if pending_request is None:
            return [list(candidate_replicas)]
        # Each round offers all replicas, so the next round need not come at once.
        pending_request.routing_context.should_backoff = True
        try:
            return ranks(candidate_replicas, _choice(pending_request.args))
        except Exception:
            logger.exception("the choice of a replica failed; any will do")
            return [list(candidate_replicas)]


def _choice(args: Sequence[Any]) -> str:
    choice = args[CHOICE_ARGUMENT] if len(args) > CHOICE_ARGUMENT else ""
    return choice if isinstance(choice, str) else ""


def ranks(replicas: Sequence[RunningReplica], actor: str) -> list[list[RunningReplica]]:
    """[[the replica with this actor], [two others]]; lists that would be empty are left out."""
    chosen = [r for r in replicas if r.replica_id.to_full_id_str() == actor] if actor else []
    others = [r for r in replicas if r not in chosen]
    return [rank for rank in (chosen, random.sample(others, min(2, len(others)))) if rank]
