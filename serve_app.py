"""The Serve application: `serve run configs/llama.yaml` imports `build_app` from here."""

# No `from __future__ import annotations`: Ray Serve inspects the builder's annotations.
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from deploy.http.access.listening import check_listening, is_loopback
from deploy.http.settings import ApiSettings
from deploy.http.tracing.options import TracingOptions
from deploy.ingress.ingress import build_ingress
from deploy.ingress.serve_client import IngressOptions
from deploy.options import INGRESS
from deploy.replica.engine_replica import EngineReplica
from deploy.replica.request_router import ChosenReplicaRouter
from deploy.serve_state import serve_log
from deploy.serve_state.drain_watch import HANDOVER_S, HEALTH_PERIOD_S
from deploy.serve_state.http_host import http_host
from deploy.start.config import AppConfig
from deploy.start.gpu_wait import patience, wait_for_gpus
from engine.actors.cluster_gpus import node_gpus, placement_strategy

_ROUTER = RequestRouterConfig(request_router_class=ChosenReplicaRouter)


def build_app(args: dict[str, Any]) -> Application:
    """Ingress, and engine replicas of each model, from the `args` of a config file
    (docs/configuration.md).

    Raises `ConfigError`, which says what to change, if they can't be served.
    """
    apps = AppConfig.models_from_args(args)
    server = apps[0].server  # what all models share
    if server.log_format == "json":  # the line that says what a start waits for
        serve_log.set_up(server.log_level, server.log_format)
    host = http_host()
    if host is not None:
        check_listening(server.api_keys_file, server.auth, host)
    encoding = "JSON" if server.log_format == "json" else "TEXT"
    tracing = None
    if server.otlp_endpoint is not None:
        tracing = TracingOptions(server.otlp_endpoint, ",".join(app.model_name for app in apps))
    settings = ApiSettings(
        server,
        add_request_id_header=False,  # Serve's proxy adds it
        is_local=host is not None and is_loopback(host),
        tracing=tracing,
    )
    ingress = serve.deployment(
        build_ingress(settings),
        name=INGRESS,
        logging_config=LoggingConfig(encoding=encoding),
        num_replicas=server.ingress_replicas,
        # A changed config starts the new ones before it stops the old ones.
        max_surge_percent=100,
        max_ongoing_requests=100_000,
        ray_actor_options=apps[0].ingress_actor_options(),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=server.hang_timeout_s,
        graceful_shutdown_timeout_s=server.drain_timeout_s + HANDOVER_S,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return ingress.bind(
        [_engines(app, encoding) for app in apps],
        [
            IngressOptions(app.server, app.model_info(), app.routing_policy, app.deployment)
            for app in apps
        ],
    )


def _engines(app: AppConfig, encoding: str) -> Application:
    """The engine replicas of one model. `encoding`: of Serve's log."""
    server = app.server
    engine = app.engine.model_copy(
        update={
            "device": _device(app),
            "enable_kv_events": app.engine.enable_kv_events or bool(app.routing_policy),
        }
    )
    use_gpu = engine.device == "cuda"
    strategy = "PACK"
    if use_gpu and ray.is_initialized():
        nodes = wait_for_gpus(engine, patience(server.gpu_wait_s), node_gpus)
        strategy = placement_strategy(engine.tp_size, engine.pp_size, nodes)
    return serve.deployment(
        EngineReplica,
        name=app.deployment,
        max_ongoing_requests=server.max_ongoing_requests,
        ray_actor_options={"num_cpus": app.cpu_per_actor},
        placement_group_bundles=app.placement_bundles(use_gpu=use_gpu),
        placement_group_strategy=strategy,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=server.hang_timeout_s,
        graceful_shutdown_timeout_s=server.drain_timeout_s + HANDOVER_S,
        graceful_shutdown_wait_loop_s=0.1,
        # The engines' calls are our own, some every second; the ingress' log has the requests.
        logging_config=LoggingConfig(encoding=encoding, enable_access_log=False),
        **({"request_router_config": _ROUTER} if app.routing_policy else {}),
        **app.replica_scaling(),
    ).bind(engine, app.engines_per_node, server)


def _device(app: AppConfig) -> str:
    """Decide `device: auto` by the cluster: its GPUs must hold one whole engine."""
    if app.engine.device != "auto":
        return app.engine.device
    gpus = sum(node_gpus()) if ray.is_initialized() else 0
    return "cuda" if gpus >= app.engine.world_size else "cpu"
