"""`TokenizerActor`: the tokenizer of one ingress. A shell around `engine.tokenizer`."""

from __future__ import annotations

import ray

from engine.actors.ray_types import actor_class, node_ip
from engine.tokenizer.tokenizer_role import TokenizerRole


class TokenizerActor:
    """`run` occupies one thread for the actor's life."""

    def __init__(self, model_path: str) -> None:
        self._role = TokenizerRole(model_path, node_ip())

    @ray.method(concurrency_group="control")
    def describe(self) -> tuple[str, int]:
        """(address of the inbox, vocabulary size in tokens)."""
        return self._role.address, self._role.tokenizer.vocab_size

    @ray.method(concurrency_group="loop")
    def run(self) -> None:
        """Serve messages; returns after `Shutdown`."""
        self._role.run()


RemoteTokenizerActor = actor_class(TokenizerActor, concurrency_groups={"loop": 1, "control": 1})
