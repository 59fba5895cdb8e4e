"""`TokenizerActor`: the tokenizer of one ingress. A shell around `engine.tokenizer`."""

from __future__ import annotations

import ray

from engine.actors.actor_process import ActorProcess
from engine.actors.ray_types import actor_class, node_ip
from engine.process.log_lines import LogFormat, log_to_stderr
from engine.tokenizer.tokenizer_role import TokenizerRole


class TokenizerActor:
    """`run` occupies one thread for the actor's life."""

    def __init__(self, model_path: str, log_format: LogFormat = "text") -> None:
        log_to_stderr(["engine"], "WARNING", log_format)
        self._role = TokenizerRole(model_path, node_ip())

    @ray.method(concurrency_group="control")
    def describe(self) -> tuple[str, ActorProcess]:
        """(address of the inbox, where this actor runs)."""
        return self._role.address, ActorProcess.of_this_actor()

    @ray.method(concurrency_group="control")
    def pulse(self) -> float:
        """0.0: a long text takes long, so only a process that doesn't answer at all hangs."""
        return 0.0

    @ray.method(concurrency_group="loop")
    def run(self) -> None:
        """Serve messages; returns after `Shutdown`."""
        self._role.run()


RemoteTokenizerActor = actor_class(TokenizerActor, concurrency_groups={"loop": 1, "control": 1})
