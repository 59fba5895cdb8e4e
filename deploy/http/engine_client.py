"""What the HTTP layer needs of the engine, independent of the transport.

`deploy.http` is written against this interface alone. `deploy.ingress.serve_client` implements it
over the tokenizer actor and the engine replicas. Tests implement it in process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict
from weakref import WeakSet

from deploy.http.aborts import Abort
from engine.checkpoint.adapter_catalog import AdapterCatalog
from engine.config import ResolvedConfig
from engine.constraints import ConstraintSpec
from engine.errors import RequestError
from engine.protocol.sequence import TokenSequence
from engine.protocol.tokenizer_messages import Conversation, TextDelta
from engine.trace import RoleTrace


@dataclass(frozen=True)
class ModelInfo:
    """The served model."""

    name: str
    resolved: ResolvedConfig
    """What its engines were configured with."""
    created: int = 0
    """Unix time at which the server started."""
    digest: str = ""
    """Of its files and of what configures its answers; with another one they may be others."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Values of sampling fields that requests leave out, from the model's generation_config.json
    (`engine.checkpoint.generation_defaults`)."""
    tool_format: str = ""
    """How it writes tool calls, a word of `TOOL_FORMATS`; "": it calls no tools."""
    reasoning_format: str = ""
    """How its outputs begin with reasoning, a word of `REASONING_FORMATS`; "": they don't."""
    adapters: AdapterCatalog | None = None
    """What requests may name instead of the model; None: it has none."""

    def has(self, name: str) -> bool:
        """Whether requests may name this model so, or one of its adapters."""
        return name == self.name or (self.adapters is not None and self.adapters.holds(name))

    @property
    def names(self) -> list[str]:
        """The model's, then those of its adapters."""
        return [self.name, *(() if self.adapters is None else self.adapters.names())]


class Spending(NamedTuple):
    """What an ingress tells of an API key's quota (`deploy.http.access.quotas`), in tokens."""

    spent: float
    """What its own requests took in all."""
    level: float
    """What is left, as far as it knows."""
    deficit: float
    """What its own requests took and time hasn't brought back yet."""


SpendingReport = dict[str, Spending]
"""By API key."""
PlainFamily = tuple[str, str, str, str]
"""A `deploy.http.metrics.exposition.Family` as plain data, for ways between processes."""


class IngressReports(NamedTuple):
    """What the ingresses measured, by name; and how many didn't answer."""

    families: dict[str, list[PlainFamily]]
    num_silent: int


@dataclass
class EngineHealth:
    """Whether requests can be served now; if not, the reason in words."""

    ok: bool
    detail: str = ""


class RoleStatus(TypedDict):
    """An actor of an engine. `wrong`: in words; "" if it lives and answers."""

    role: str
    pid: int
    wrong: str


ReplicaState = Literal["serving", "unwell", "lost", "starting", "draining"]
"""`unwell`: it answers, but one of its roles doesn't. `lost`: it has ended or doesn't answer, and
none has taken its place. `starting`: it is missing, and was never seen."""


class ReplicaStatus(TypedDict):
    """A place for an engine replica, and what is known of the replica that has it. The place stays
    when the replica is lost, until another one takes it."""

    place: int
    replica: str
    state: ReplicaState
    detail: str
    node: str
    roles: list[RoleStatus]
    stats: Mapping[str, Any] | None


class EngineStatus(NamedTuple):
    """The engine replicas as an ingress sees them now."""

    target: int | None
    """How many there should be; None if Serve doesn't tell."""
    replicas: list[ReplicaStatus]
    tokenizer_wrong: str


class EngineClient(ABC):
    """Asynchronous face of tokenizer and engines; every method may be called concurrently."""

    def __init__(self) -> None:
        self.aborts: WeakSet[Abort] = WeakSet()
        """Those of the requests in this process, as long as anybody holds them."""

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo:
        """Static facts about the model; valid once the client has started."""

    @property
    def ingress(self) -> str:
        """Name of this process among those that serve HTTP."""
        return "0"

    @property
    def resumes(self) -> Mapping[str, int]:
        """How often sequences were resumed; the keys say what had been lost."""
        return {}

    @abstractmethod
    async def encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""

    @abstractmethod
    async def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special tokens included (for `echo`)."""

    @abstractmethod
    async def decode_each(self, token_ids: list[int]) -> list[str]:
        """Text of each token alone; U+FFFD stands for a part of a character."""

    @abstractmethod
    async def render_chat(self, chat: Conversation) -> list[int]:
        """Token ids of a conversation. Raises `RequestError` when the template refuses it."""

    @abstractmethod
    async def check_constraint(self, spec: ConstraintSpec) -> None:
        """Raise `RequestError` if an engine must not see the constraint. May take seconds. To be
        called once for a request, before its sequences are generated."""

    @abstractmethod
    async def generate(
        self,
        sequence: TokenSequence,
        read: Callable[[list[TextDelta]], None],
        known_ids: Sequence[int] = (),
    ) -> None:
        """Run a sequence until a delta has a `finish_reason`.

        `read` is called where deltas arrive. Each call gets all deltas that are there, at least
        one, so that a path which is behind catches up. A call costs no wake-up of a task.
        `known_ids`: the first tokens of its output, as an earlier answer had them. They are
        prefilled and not computed again. Not for those whose log-probabilities are wanted.

        Raises `RequestError` if the engine refuses or fails the request, `EngineDeadError` if
        there is no engine, and what `read` raises. Cancelling aborts the request.
        """

    def abort_here(self, request_id: str | None, owner: str | None = None) -> None:
        """End the requests of this process that have this id and came with the API key `owner`;
        None: with any id, with any key."""
        for abort in list(self.aborts):
            if request_id in (None, *abort.ids) and owner in (None, abort.owner):
                abort.set()

    @abstractmethod
    async def abort(self, request_id: str | None, owner: str | None) -> None:
        """As `abort_here`, in whichever process the requests are.

        Unknown ids are ignored. Raises `EngineDeadError` if a process doesn't answer."""

    async def tell_spending(self, ingress: str, report: SpendingReport) -> None:  # noqa: B027
        """Tell every other ingress what the requests of this one, `ingress`, spent. Here there is
        no other one."""

    @abstractmethod
    async def flush_cache(self) -> list[str]:
        """Empty the prefix cache of every engine replica without requests. Returns what kept the
        others from it, in words."""

    async def refresh_adapters(self) -> None:  # noqa: B027
        """Learn which adapters were loaded by hand. Here none can be."""

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> list[str]:
        """Serve the adapter in the folder `path` as `name`, everywhere and from now on, as far as
        `refresh_adapters` has told which there are. Without
        `replace` there must be none of this name. Returns what is wrong with replicas that don't
        have it yet, in words. Raises `RequestError`."""
        raise RequestError("this server loads no adapters", status=403)

    async def unload_adapter(self, name: str) -> None:
        """Serve it no more; requests that run with it go on. As far as `refresh_adapters` has told
        which there are. Raises `RequestError`."""
        raise RequestError("this server loads no adapters", status=403)

    @abstractmethod
    async def check_generate(self, timeout_s: float) -> EngineHealth:
        """As `health`, and let every engine replica generate one token within `timeout_s`. A
        replica that is busy with other requests counts as well if these go on."""

    @abstractmethod
    async def health(self) -> EngineHealth:
        """Ask every engine; never raises."""

    @abstractmethod
    async def stats(self) -> list[dict[str, float]]:
        """Latest scheduler statistics of each engine replica (see engine.scheduler.stats)."""

    @abstractmethod
    async def engine_status(self) -> EngineStatus:
        """The engine replicas and their roles, those included that were lost. Never raises, and
        waits no more than a second for a replica that doesn't answer."""

    async def ingress_metrics(self, timeout_s: float) -> IngressReports:
        """What every ingress measured, this one included or not. Raises `EngineDeadError` if none
        can be asked. Here there is no other one."""
        return IngressReports({}, 0)

    @abstractmethod
    async def trace(self, last: int) -> dict[str, list[RoleTrace]]:
        """What the roles of each engine replica did in their last steps, by replica."""

    @abstractmethod
    async def server_info(self) -> dict[str, Any]:
        """The configuration in effect by key, and `replicas`: for each engine replica its name,
        `num_kv_tokens`, `device`, `dtype`, `cpu_threads` and `max_model_len`."""
