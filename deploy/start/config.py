"""The application's configuration: `args` of a Serve config file in `configs/`."""

# No `from __future__ import annotations`: pydantic reads the annotations.
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from deploy.http.access.options import check_access
from deploy.http.parsers.detection import check_parsers
from deploy.http.tracing.options import check_tracing
from deploy.replica.autoscaling import EngineLoadPolicy
from deploy.routing import find_policy
from engine.config import EngineConfig, ResolvedConfig, load_config
from engine.errors import ConfigError
from engine.process.log_lines import LogFormat

Quantity = Annotated[float, Field(gt=0)]
_CPU_PER_ACTOR = 0.02
"""Logical CPUs that each actor reserves with Ray. Small: on CPU the real limit is threads
(`cpu_threads`), and a two-core machine must still hold DP x TP x PP."""


class AutoscalingOptions(BaseModel):
    """Sets the number of replicas between its bounds by requests, KV use and queue."""

    model_config = ConfigDict(extra="forbid")

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(2, ge=1)
    target_ongoing_requests: float = Field(32.0, gt=0)
    target_kv_use: float = Field(0.8, gt=0, le=1)
    target_queued_tokens: float = Field(8192.0, gt=0)
    upscale_delay_s: float = Field(10.0, ge=0)
    downscale_delay_s: float = Field(300.0, ge=0)


class ServerOptions(BaseModel):
    """Keys of the application that are not the engine's."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    served_model_name: str | None = None
    """The model's name in the API; None: the last part of `model`."""
    num_replicas: int = Field(1, ge=1, le=256)
    """Number of engines (data parallel)."""
    autoscaling: AutoscalingOptions | None = None
    """Takes the place of `num_replicas`."""
    routing_policy: str = "prefix_aware"
    """Which engine replica gets a request: a word of `ROUTING_POLICIES`, `module:Class` for a
    policy from elsewhere, or `serve` for Ray Serve's own router."""
    ingress_replicas: int = Field(1, ge=1, le=64)
    max_ongoing_requests: int = Field(4096, ge=1)
    """Requests that one engine replica may hold, running and queued."""
    stream_stall_timeout_s: float = Field(120.0, gt=0)
    """A stream is aborted when its client has read nothing for this time."""
    api_keys_file: str | None = None
    """Path of the keys that may call (docs/security.md); read again within 2 s of a change."""
    auth: Literal["keys", "none"] | None = None
    """`none`: everybody may call, also from other machines. By default nobody needs a key if there
    is no `api_keys_file`, and then only programs of this machine may reach the server."""
    allowed_hosts: list[str] = Field(default_factory=list, max_length=1000)
    """Names and addresses that `Host` may have besides this machine's; empty: any."""
    cors_origins: list[str] = Field(default_factory=list, max_length=1000)
    """Sites whose pages may use the API in a browser, as `https://chat.example.com`."""
    body_timeout_s: float = Field(30.0, gt=0)
    """A request's body has this time to come."""
    max_body_bytes: int = Field(4 * 2**20, ge=1024, le=2**30)
    """A request with a larger body is refused (413)."""
    max_request_tokens: int = Field(4 * 2**20, ge=1)
    """Tokens of all sequences of one request: each has its prompt and its `max_tokens`."""
    allow_request_chat_templates: bool = False
    """Take `chat_template` from requests; only for trusted clients."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls: a word of `TOOL_FORMATS`, `auto` for what its chat template
    shows, or `none`."""
    reasoning_parser: str = "auto"
    """How the model marks its reasoning: a word of `REASONING_FORMATS`, `auto` for what its chat
    template shows, or `none`."""
    resume_wait_s: float = Field(60.0, ge=0)
    """How long a request waits for an engine that takes it, at first or after a loss."""
    max_resumes: int = Field(16, ge=0)
    """How often a request is resumed at most."""
    hang_timeout_s: float = Field(10.0, ge=2)
    """A process that doesn't answer for this time counts as dead and is killed."""
    drain_timeout_s: float = Field(30.0, ge=0)
    """When a replica is stopped, its running requests have this time to end. Then another replica
    continues them."""
    ingress_resources: dict[str, Quantity] = Field(default_factory=dict)
    """Custom resources of Ray that each ingress reserves: it runs on nodes that have them."""
    engine_resources: dict[str, Quantity] = Field(default_factory=dict)
    """The same for each engine's scheduler."""
    worker_resources: dict[str, Quantity] = Field(default_factory=dict)
    """The same for each worker of an engine."""
    gpu_wait_s: float | None = Field(600.0, ge=0)
    """A cluster without the GPUs of one engine has this time to grow; then the deployment fails.
    None: Ray places the engine when it can. The launcher's own cluster can't grow: no wait."""
    metrics_names: Literal["manta", "vllm"] = "manta"
    """`vllm`: `/metrics` has vLLM's names beside Manta's, for dashboards made for vLLM."""
    otlp_endpoint: str | None = None
    """Base URL of a collector of traces (OTLP over HTTP), as `http://collector:4318`; None: there
    are no traces. Needs the extra `otel`."""
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    log_format: LogFormat = "text"
    """`json`: every line of the log is one JSON object."""


class AppConfig:
    """Everything that one application needs, checked."""

    def __init__(self, server: ServerOptions, engine: EngineConfig, resolved: ResolvedConfig):
        self.server = server
        self.engine = engine
        self.resolved = resolved

    @classmethod
    def from_args(cls, args: dict[str, Any]) -> "AppConfig":
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
        scaling = server.autoscaling
        if scaling is not None and scaling.max_replicas < scaling.min_replicas:
            raise ConfigError(
                f"autoscaling.max_replicas ({scaling.max_replicas}) is below min_replicas "
                f"({scaling.min_replicas}); raise it."
            )
        if scaling is not None and server.num_replicas != 1:
            raise ConfigError("set either num_replicas or autoscaling, not both.")
        return cls(server, engine, engine.resolve())

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.server.served_model_name or self.engine.model.rstrip("/").split("/")[-1]

    @property
    def max_replicas(self) -> int:
        """Engines that may exist at once."""
        scaling = self.server.autoscaling
        return self.server.num_replicas if scaling is None else scaling.max_replicas

    @property
    def engines_per_node(self) -> int:
        """Engines that share a machine's cores and memory: all, unless custom resources place
        them."""
        return 1 if self.server.engine_resources else self.max_replicas

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
        targets = {key: options[key] for key in options if key.startswith("target_")}
        for key in targets:
            if key != "target_ongoing_requests":  # Serve's own key; it warns if it is missing
                del options[key]
        policy = {"policy_function": EngineLoadPolicy, "policy_kwargs": targets}
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
