"""`ServeStates`: what Serve's controller says of this application's replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.serve._private.common import DeploymentID, DeploymentStatusInfo
from ray.serve._private.long_poll import LongPollNamespace
from ray.serve.context import _get_global_client
from ray.serve.generated.serve_pb2 import DeploymentStatusInfo as DeploymentStatusInfoProto

from deploy.options import ENGINE, INGRESS
from engine.process.shared_answer import SharedAnswer

_BROKEN = ("UNHEALTHY", "DEPLOY_FAILED")
_SCALING = ("UPSCALING", "DOWNSCALING")
_COMING = ("STARTING", "UPDATING", "RECOVERING")


class DeploymentState(NamedTuple):
    """A deployment that exists, whether or not Serve has a target for it at present."""

    status: str
    states: dict[str, str]
    """Serve's word for the state of each replica, by the replica's name. Without a target: only
    those that run."""
    target: int | None
    """How many replicas there should be; None: Serve doesn't tell now."""


class ServeStates:
    """Asks the controller, in a thread and one question at a time: a controller that hangs would
    otherwise take a thread for each question. Use from one event loop."""

    def __init__(self, engine: str = ENGINE) -> None:
        self.engine = engine
        """The deployment that is asked for beside the ingress."""
        self._answer = SharedAnswer[dict[str, DeploymentState]](0.0)

    async def ask(self, timeout_s: float) -> dict[str, DeploymentState]:
        """What `deployment_states` tells. Raises what the controller raises, `TimeoutError`
        if it doesn't answer in time."""
        async with asyncio.timeout(timeout_s):
            return await self._answer.get(lambda: asyncio.to_thread(deployment_states, self.engine))


def deployment_states(engine: str = ENGINE) -> dict[str, DeploymentState]:
    """The ingress and the deployment `engine` by name, as far as they exist. Blocks for a call to
    the controller, or for a few.

    From the moment of a `serve deploy` until the new application is built, and after one that was
    refused, Serve lists no deployments in the application, although the old ones go on. Then each
    is asked for by its name.
    """
    client: Any = _get_global_client()
    name = serve.get_replica_context().app_name
    app = client.get_serve_details()["applications"].get(name)
    listed: Mapping[str, Any] = {} if app is None else app["deployments"]
    found: dict[str, DeploymentState] = {}
    for deployment in (engine, INGRESS):
        if deployment in listed:
            found[deployment] = _listed(listed[deployment])
        else:
            state = _unlisted(client, DeploymentID(name=deployment, app_name=name))
            if state is not None:
                found[deployment] = state
    return found


def replicas_lost(
    deployments: Mapping[str, DeploymentState], num_engines: int, engine: str = ENGINE
) -> str:
    """Which replicas are lost, in words; "" if none is.

    `num_engines` replicas of the deployment `engine` are known to live. A replica that comes or
    goes because their number changes is no loss.
    """
    gone = [
        f"{name}: Serve has deleted it" for name in (engine, INGRESS) if name not in deployments
    ]
    lost = [f"{name}: {why}" for name, d in deployments.items() if (why := _lost(d))]
    state = deployments.get(engine)
    running = 0 if state is None else list(state.states.values()).count("RUNNING")
    if running > num_engines:
        lost.append(f"{running - num_engines} of {running} engine replicas are gone")
    return "; ".join([*gone, *lost])


class EngineTarget(NamedTuple):
    """What Serve wants of the engine's deployment."""

    num_replicas: int | None
    """None: Serve doesn't tell now."""
    states: dict[str, str]
    """Serve's word for the state of each replica, by the replica's name."""


def engine_target(
    deployments: Mapping[str, DeploymentState], engine: str = ENGINE
) -> EngineTarget | None:
    """How many engine replicas there should be, and which there are; None if there is no engine."""
    state = deployments.get(engine)
    return None if state is None else EngineTarget(state.target, state.states)


def _listed(told: Mapping[str, Any]) -> DeploymentState:
    states = {r["replica_id"]: _word(r["state"]) for r in told["replicas"]}
    return DeploymentState(_word(told["status"]), states, int(told["target_num_replicas"]))


def _unlisted(client: Any, deployment: DeploymentID) -> DeploymentState | None:
    """A deployment of which the application has no target now; None if it doesn't exist."""
    ask = client._controller.get_deployment_status.remote(deployment.name, deployment.app_name)
    told = ray.get(ask)
    if told is None:
        return None
    status = DeploymentStatusInfo.from_proto(DeploymentStatusInfoProto.FromString(told)).status
    key = (LongPollNamespace.DEPLOYMENT_TARGETS, deployment)
    # Answered at once: nobody has seen the version -1. It is what Serve's routers follow.
    targets = ray.get(client._controller.listen_for_change.remote({key: -1}))
    running = targets[key].object_snapshot.running_replicas if key in targets else []
    states = {replica.replica_id.unique_id: "RUNNING" for replica in running}
    return DeploymentState(_word(status), states, None)


def _word(state: Any) -> str:
    """Of a member of Serve's enumerations of strings, whose `str` has the class' name too."""
    return str(getattr(state, "value", state))


def _lost(deployment: DeploymentState) -> str:
    status, states = deployment.status, list(deployment.states.values())
    if status in _BROKEN or (status not in _SCALING and any(s in _COMING for s in states)):
        counts = {state: states.count(state) for state in dict.fromkeys(states)}
        return f"{status}, replicas {counts}"
    return ""
