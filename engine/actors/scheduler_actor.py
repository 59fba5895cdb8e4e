"""`SchedulerActor`: the scheduler of one engine. A shell around `engine.loop.scheduler_role`."""

from __future__ import annotations

import gc
import logging
import threading
import time

import ray

from engine.actors.actor_process import ActorProcess
from engine.actors.ray_types import actor_class, node_ip
from engine.config import EngineConfig, ResolvedConfig
from engine.constraints.grammar_compiler import GrammarCompiler
from engine.errors import ConfigError
from engine.executor.message_executor import collect_ready
from engine.grammars.model_compiler import make_grammar_compiler
from engine.loop.scheduler_role import IDLE_POLL_S, SchedulerRole
from engine.process.log_lines import LogFormat, log_to_stderr
from engine.protocol.transport import Inbox
from engine.scheduler.scheduler_config import SchedulerConfig
from engine.scheduler.stats import SchedulerStats
from engine.trace import pack, scheduler_trace

logger = logging.getLogger(__name__)


class SchedulerActor:
    """`run` occupies one thread as long as the engine lives; other threads answer control calls."""

    def __init__(self, log_format: LogFormat = "text") -> None:
        log_to_stderr(["engine"], "WARNING", log_format)
        self._config: ResolvedConfig | None = None
        self._inbox: Inbox | None = None
        self._results: Inbox | None = None
        self._role: SchedulerRole | None = None
        self._ready = threading.Event()

    @ray.method(concurrency_group="control")
    def prepare(self, config: EngineConfig, num_kv_tokens: int | None) -> tuple[str, str]:
        """Open the sockets. Returns the addresses of the request inbox and the result inbox.

        If `num_kv_tokens` is known already, raises `ConfigError` on impossible sizes, before any
        weight is read.
        """
        self._config = config.resolve()
        if num_kv_tokens is not None:
            SchedulerConfig(self._config, num_kv_tokens)
        self._inbox, self._results = Inbox(node_ip()), Inbox(node_ip())
        return self._inbox.address, self._results.address

    @ray.method(concurrency_group="loop")
    def run(self) -> None:
        """Wait for the workers, then run the loop. Returns after `Shutdown`; raises if a worker is
        lost or can't start."""
        if self._config is None or self._inbox is None or self._results is None:
            raise RuntimeError("prepare comes first")
        grammars = _load_grammars(self._config)  # the workers load the model meanwhile
        workers = collect_ready(self._results, self._config.engine.world_size, _nobody)
        config = SchedulerConfig(self._config, workers.num_kv_tokens)
        self._role = SchedulerRole(config, self._inbox, workers, self._results, grammars)
        # All objects that live now live as long as the process: keep them out of collections.
        gc.collect()
        gc.freeze()
        self._ready.set()
        self._role.run(_nobody)

    @ray.method(concurrency_group="control")
    def wait_ready(self, timeout_s: float) -> int | None:
        """Tokens of KV cache once all workers are ready; None if they aren't within `timeout_s`."""
        if not self._ready.wait(timeout_s):
            return None
        return self._get_role().scheduler.config.num_kv_tokens

    @ray.method(concurrency_group="control")
    def ping(self) -> tuple[float, SchedulerStats]:
        """(seconds since the loop last turned, latest statistics)."""
        role = self._get_role()
        return time.monotonic() - role.last_turn, role.stats

    @ray.method(concurrency_group="control")
    def pulse(self) -> float:
        """Seconds that the loop has stood still beyond its longest normal pause."""
        return max(0.0, time.monotonic() - self._get_role().last_turn - IDLE_POLL_S)

    @ray.method(concurrency_group="control")
    def process(self) -> ActorProcess:
        """Where this actor runs."""
        return ActorProcess.of_this_actor()

    @ray.method(concurrency_group="control")
    def trace(self, last: int) -> bytes:
        """What the loop did with the last steps: a packed `RoleTrace`."""
        return pack(scheduler_trace(self._get_role().trace, last))

    def _get_role(self) -> SchedulerRole:
        if self._role is None:
            raise RuntimeError("the workers aren't ready")
        return self._role


def _load_grammars(config: ResolvedConfig) -> GrammarCompiler | None:
    """The compiler of the model's grammars; None, and requests with one are refused, if the model
    has no tokenizer."""
    compiler = make_grammar_compiler(config.model)
    try:
        compiler.load()
    except ConfigError as error:
        logger.warning("no structured output: %s", error)
        return None
    return compiler


def _nobody() -> str:
    """No lost worker: their owner, not this process, learns of a loss first, from Ray."""
    return ""


RemoteSchedulerActor = actor_class(SchedulerActor, concurrency_groups={"loop": 1, "control": 2})
