"""`ServerOptions`: keys of a config file that are not the engine's. Processes hold them whole."""

# No `from __future__ import annotations`: pydantic reads the annotations.
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.process.log_lines import LogFormat

ENGINE, INGRESS = "engine", "ingress"
"""Names of the deployments. With several models those of the engines have a model's name, too."""
Quantity = Annotated[float, Field(gt=0)]


class AutoscalingOptions(BaseModel):
    """Sets the number of replicas between its bounds by requests, KV use and queue."""

    model_config = ConfigDict(extra="forbid")

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(2, ge=1)
    target_ongoing_requests: float = Field(32.0, gt=0)
    target_kv_use: float = Field(0.8, gt=0, le=1)
    target_queued_tokens: float = Field(8192.0, gt=0)
    ignore_flex: bool = False
    """Flex requests and lines of batches ask for no replicas."""
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
    request_store: Literal["sqlite", "redis", "none"] = "sqlite"
    """Where requests of streams and responses of `POST /v1/responses` are kept: in a file that the
    ingresses of a machine share, in a Redis server that all share, or nowhere."""
    request_store_url: str | None = None
    """Of Redis, as `redis://host:6379/0`, for `request_store: redis`."""
    request_store_path: str | None = None
    """The file; None: `manta/records.sqlite3` in the user's folder for state."""
    request_store_max_age_s: float = Field(30 * 24 * 3600.0, gt=0)
    """Older ones are removed."""
    request_store_stream_age_s: float = Field(600.0, ge=0)
    """How long the request of a stream is kept behind its end, so that it can be read on; 0: it
    isn't."""
    request_store_max_bytes: int = Field(2**30, ge=2**20)
    """The oldest are removed while the file's content is larger."""
    file_store: str | None = None
    """Where files and outputs of batches are: a folder, or a URL of fsspec as `s3://bucket/manta`;
    None: `manta/files` in the user's folder for state; `none`: there are no files and batches."""
    file_max_age_s: float = Field(30 * 24 * 3600.0, gt=0)
    """Older ones are removed."""
    max_file_bytes: int = Field(2**30, ge=1024)
    """A larger file is refused (413)."""
    file_store_max_bytes: int = Field(2**36, ge=2**20)
    """Of all files of an API key."""
    on_disconnect: Literal["cancel", "continue"] = "cancel"
    """What becomes of a request that is kept when its client leaves: it is ended, or goes on for
    `on_disconnect_grace_s`, and its client finds more of it when it comes back."""
    on_disconnect_grace_s: float = Field(30.0, gt=0)
    otlp_endpoint: str | None = None
    """Base URL of a collector of traces (OTLP over HTTP), as `http://collector:4318`; None: there
    are no traces. Needs the extra `otel`."""
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
    log_format: LogFormat = "text"
    """`json`: every line of the log is one JSON object."""
