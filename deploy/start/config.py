"""The application's configuration: `args` of a Serve config file in `configs/`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from deploy.http.access.options import check_access
from deploy.http.engine_client import ModelInfo
from deploy.http.files.file_store import check_file_store
from deploy.http.parsers.detection import check_parsers, reasoning_format_of, tool_format_of
from deploy.http.records.redis_store import check_redis_url
from deploy.http.tracing.options import check_tracing
from deploy.options import ENGINE, ServerOptions
from deploy.replica.autoscaling import EngineLoadPolicy
from deploy.routing import find_policy
from engine.checkpoint.model_digest import model_digest
from engine.config import EngineConfig, ResolvedConfig, load_config
from engine.errors import ConfigError
from engine.tokenizer.loading import load_chat_templates

_CPU_PER_ACTOR = 0.02
"""Logical CPUs that each actor reserves with Ray. Small: on CPU the real limit is threads
(`cpu_threads`), and a two-core machine must still hold DP x TP x PP."""


_OF_A_MODEL = frozenset(
    (
        *("served_model_name", "num_replicas", "autoscaling", "routing_policy"),
        *("max_ongoing_requests", "tool_call_parser", "reasoning_parser"),
        *("engine_resources", "worker_resources"),
    )
)
"""Keys of `ServerOptions` that each of several models may have its own of."""


class AppConfig:
    """A model of an application, and all that serves it, checked."""

    def __init__(self, server: ServerOptions, engine: EngineConfig, resolved: ResolvedConfig):
        self.server = server
        self.engine = engine
        self.resolved = resolved
        self.deployment = ENGINE
        """Of its engines."""
        self.num_neighbours = 0
        """Engines of the application's other models, which may be on the same machines."""
        self.is_first = True
        """Of the application's models, which share its ingresses."""

    @classmethod
    def models_from_args(cls, args: dict[str, Any]) -> list[AppConfig]:
        """Check `args` of a config file, with or without `models`. Raises `ConfigError`."""
        if not isinstance(args, dict) or "models" not in args:
            return [cls.from_args(args)]
        shared = {key: value for key, value in args.items() if key != "models"}
        found = [cls.from_args(given) for given in _model_args(args["models"], shared)]
        _check_names(found)
        for app in found:
            app.is_first = app is found[0]
            app.deployment = f"{ENGINE}-{_slug(app.model_name)}"
            app.num_neighbours = sum(
                other.max_replicas
                for other in found
                if other is not app and not other.server.engine_resources
            )
        return found

    @classmethod
    def from_args(cls, args: dict[str, Any]) -> AppConfig:
        """Check `args` of a config file. Raises `ConfigError` naming keys and remedies."""
        if not isinstance(args, dict):
            raise ConfigError("`args` of the application must be a mapping of keys to values.")
        known = set(ServerOptions.model_fields)
        server = load_config(ServerOptions, {k: v for k, v in args.items() if k in known})
        rest = {k: v for k, v in args.items() if k not in known}
        engine = load_config(EngineConfig, rest)
        if server.routing_policy != "serve":
            find_policy(server.routing_policy)
        check_parsers(server.tool_call_parser, server.reasoning_parser)
        check_access(server.api_keys_file, server.auth, server.cors_origins)
        check_tracing(server.otlp_endpoint)
        if server.request_store == "redis":
            check_redis_url(server.request_store_url)
        if server.file_store not in (None, "none"):
            check_file_store(server.file_store)
        if server.on_disconnect == "continue" and server.request_store == "none":
            raise ConfigError(
                "on_disconnect: continue is for requests that are kept, and request_store: none "
                "keeps none; set request_store, or on_disconnect: cancel."
            )
        scaling = server.autoscaling
        if scaling is not None and scaling.max_replicas < scaling.min_replicas:
            raise ConfigError(
                f"autoscaling.max_replicas ({scaling.max_replicas}) is below min_replicas "
                f"({scaling.min_replicas}); raise it."
            )
        if scaling is not None and server.num_replicas != 1:
            raise ConfigError("set either num_replicas or autoscaling, not both.")
        config = cls(server, engine, engine.resolve())
        if config.model_name in engine.lora_adapters:
            raise ConfigError(
                f"lora_adapters names an adapter '{config.model_name}', as the model itself is "
                "called; call it otherwise, or set served_model_name."
            )
        return config

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        last = self.engine.model.rstrip("/").split("/")[-1]
        return self.server.served_model_name or last.removesuffix(".gguf")

    def model_info(self) -> ModelInfo:
        """The served model. Raises `ConfigError` if one of its files can't be read."""
        templates = load_chat_templates(self.resolved.model.path)
        server = self.server
        tool_format = tool_format_of(server.tool_call_parser, templates)
        reasoning_format = reasoning_format_of(server.reasoning_parser, tool_format, templates)
        try:
            digest = model_digest(self.resolved, tool_format, reasoning_format)
        except OSError as error:
            raise ConfigError(f"a file of the model can't be read: {error}.") from error
        return ModelInfo(
            self.model_name,
            self.resolved,
            digest=digest,
            sampling_defaults=self.engine.sampling_defaults(self.resolved.model),
            tool_format=tool_format,
            reasoning_format=reasoning_format,
        )

    @property
    def max_replicas(self) -> int:
        """Engines that may exist at once."""
        scaling = self.server.autoscaling
        return self.server.num_replicas if scaling is None else scaling.max_replicas

    @property
    def engines_per_node(self) -> int:
        """Engines that share a machine's cores and memory: all, unless custom resources place
        them."""
        return 1 if self.server.engine_resources else self.max_replicas + self.num_neighbours

    @property
    def routing_policy(self) -> str:
        """How the ingress chooses replicas; "" if Serve chooses or there is only one replica."""
        policy = self.server.routing_policy
        return "" if policy == "serve" or self.max_replicas == 1 else policy

    def replica_scaling(self) -> dict[str, Any]:
        """Serve's options for the number of engine replicas."""
        scaling = self.server.autoscaling
        if scaling is None:
            return {"num_replicas": self.server.num_replicas}
        options = scaling.model_dump()
        ours = {key: options[key] for key in inspect.signature(EngineLoadPolicy).parameters}
        for key in ours:
            if key != "target_ongoing_requests":  # Serve's own key; it warns if it is missing
                del options[key]
        policy = {"policy_function": EngineLoadPolicy, "policy_kwargs": ours}
        return {"autoscaling_config": {**options, "policy": policy}}

    def placement_bundles(self, *, use_gpu: bool) -> list[dict[str, float]]:
        """Bundle 0 holds replica and scheduler; then comes one bundle per worker in rank order."""
        worker = {"GPU": 1.0, "CPU": 1.0} if use_gpu else {"CPU": _CPU_PER_ACTOR}
        worker |= self.server.worker_resources
        scheduler = {"CPU": _CPU_PER_ACTOR} | self.server.engine_resources
        return [scheduler] + [dict(worker) for _ in range(self.engine.world_size)]

    def ingress_actor_options(self) -> dict[str, Any]:
        """Ray's options for an ingress. Where it has custom resources, it needs no CPUs: nodes
        without any then take ingresses and nothing else."""
        resources = self.server.ingress_resources
        if resources:
            return {"num_cpus": 0, "resources": dict(resources)}
        return {"num_cpus": self.cpu_per_actor}

    @property
    def cpu_per_actor(self) -> float:
        """Logical CPUs that each small actor reserves."""
        return _CPU_PER_ACTOR


def _model_args(models: Any, shared: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of each model: its own, and those that all share. Raises `ConfigError`."""
    if not isinstance(models, list) or not models or not all(isinstance(m, dict) for m in models):
        raise ConfigError("`models` must be a list, with the keys of one model in each entry.")
    if "model" in shared or "served_model_name" in shared:
        raise ConfigError(
            "with `models`, `model` and served_model_name belong into the entries of the list."
        )
    for given in models:
        if not isinstance(given.get("model"), str):
            raise ConfigError("each entry of `models` needs a `model`.")
        wrong = sorted(given.keys() & ServerOptions.model_fields.keys() - _OF_A_MODEL)
        if wrong:
            raise ConfigError(
                f"{wrong[0]} is the same for all models: set it beside `models`, not in an entry."
            )
    return [{**shared, **given} for given in models]


def _check_names(models: list[AppConfig]) -> None:
    """Raise `ConfigError` if it isn't clear which model a request or a deployment is for."""
    seen: set[str] = set()
    for app in models:
        for name in (app.model_name, *app.engine.lora_adapters):
            if name in seen:
                raise ConfigError(
                    f"two of `models` serve '{name}'; set served_model_name, or call the adapter "
                    "otherwise."
                )
            seen.add(name)
    slugs = [_slug(app.model_name) for app in models]
    for app, slug in zip(models, slugs, strict=True):
        if slugs.count(slug) > 1:
            raise ConfigError(
                f"the name '{app.model_name}' differs from another model's in signs alone; set "
                "served_model_name."
            )
    given = [app.engine.lora_folder for app in models]
    folders = [Path(folder).resolve() for folder in given if folder is not None]
    if len(set(folders)) < len(folders):
        raise ConfigError(
            "two of `models` have the same lora_folder; a name there doesn't tell which model it "
            "is for. Give each a folder of its own."
        )


def _slug(name: str) -> str:
    """A model's name as a part of a deployment's."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
