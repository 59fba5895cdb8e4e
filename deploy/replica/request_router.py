"""`ChosenReplicaRouter`: Serve's router, which obeys the choice that a call carries."""

# No `from __future__ import annotations`: Ray Serve may inspect the annotations.
import logging
import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

logger = logging.getLogger(__name__)

CHOICE_ARGUMENT = 2
"""Position in the arguments of `EngineReplica.generate`."""


class ChosenReplicaRouter(RequestRouter):
    """The replica whose actor's name is the call's third argument, if Serve would use it; else
    the less busy of two others.

    The choice itself is made where the prompt, the caches and the loads are known
    (`deploy.ingress.replica_router`). Requests are fulfilled each by its own choice, never in order
    (Serve's `FIFOMixin` would swap them).
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
        # All are offered in each round, so the next one need not come at once.
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
    """[[the replica with this actor], [two others]], without what there isn't."""
    chosen = [r for r in replicas if r.replica_id.to_full_id_str() == actor] if actor else []
    others = [r for r in replicas if r not in chosen]
    return [rank for rank in (chosen, random.sample(others, min(2, len(others)))) if rank]
