"""`replicas_lost`, `engine_target`: what Serve's controller says of this application's replicas."""

from __future__ import annotations

from typing import Any, NamedTuple

from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import DeploymentStatusOverview

_BROKEN = ("UNHEALTHY", "DEPLOY_FAILED")
_SCALING = ("UPSCALING", "DOWNSCALING")
_COMING = ("STARTING", "UPDATING", "RECOVERING")


def replicas_lost(num_engines: int) -> str:
    """Which replicas are lost, in words; "" if none is. Blocks for a call to the controller.

    `num_engines` engine replicas are known to live. A replica that comes or goes because their
    number changes is no loss.
    """
    app = serve.get_replica_context().app_name
    deployments = serve.status().applications[app].deployments
    lost = [f"{name}: {why}" for name, d in deployments.items() if (why := _lost(d))]
    running = deployments["engine"].replica_states.get("RUNNING", 0)
    if running > num_engines:
        lost.append(f"{running - num_engines} of {running} engine replicas are gone")
    return "; ".join(lost)


class EngineTarget(NamedTuple):
    """What Serve wants of the engine's deployment."""

    num_replicas: int
    states: dict[str, str]
    """Serve's word for the state of each replica, by the replica's name."""


def engine_target() -> EngineTarget:
    """How many engine replicas there should be, and which there are. Blocks for a call to the
    controller."""
    client: Any = _get_global_client()
    app = client.get_serve_details()["applications"][serve.get_replica_context().app_name]
    engine = app["deployments"]["engine"]
    states = {r["replica_id"]: str(r["state"]) for r in engine["replicas"]}
    return EngineTarget(int(engine["target_num_replicas"]), states)


def _lost(deployment: DeploymentStatusOverview) -> str:
    status = deployment.status.value
    states = {str(state): n for state, n in deployment.replica_states.items() if n}
    if status in _BROKEN or (
        status not in _SCALING and any(states.get(state) for state in _COMING)
    ):
        return f"{status}, replicas {states}"
    return ""
