"""What the scheduler goes by, checked."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import MachineConfig
from engine.errors import ConfigError
from engine.memory_need import WindowNeed


@dataclass(frozen=True)
class SchedulerConfig(MachineConfig):
    """A resolved configuration, and the KV size that the workers decided, in tokens."""

    num_kv_tokens: int

    def __post_init__(self) -> None:
        usable = self.num_kv_tokens // self.engine.page_size * self.engine.page_size
        if usable < self.max_model_len:
            raise ConfigError(
                f"the KV cache ({usable} tokens) can't hold one request of max_model_len "
                f"({self.max_model_len}); raise max_total_tokens or lower max_model_len."
            )
        spare = self.engine.draft_tokens
        if usable < self.max_model_len + spare:
            raise ConfigError(
                f"the KV cache ({usable} tokens) can't hold one request of max_model_len "
                f"({self.max_model_len}) and {spare} tokens of drafts (two steps of "
                "num_speculative_tokens + 1); raise max_total_tokens, or lower max_model_len or "
                "num_speculative_tokens."
            )

    @property
    def windows(self) -> WindowNeed | None:
        """What layers with windows have room for; None: for as many tokens as the others."""
        found = WindowNeed.of(self.resolved)
        return found if found is not None and found.slots(self.num_kv_tokens) else None

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self.resolved.model.vocab_size

    @property
    def chunk_size(self) -> int | None:
        """Prompt tokens of a step; None: prompts aren't chunked."""
        size = self.engine.chunked_prefill_size
        return size if size > 0 else None

    @property
    def lookahead(self) -> int:
        """Steps of one micro-batch that may be in flight."""
        return self.engine.lookahead

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that the scheduler cycles through."""
        return self.engine.num_micro_batches

    @property
    def max_micro_batch_size(self) -> int:
        """Running requests of a micro-batch."""
        most = self.engine.pp_max_micro_batch_size
        return most or -(-self.engine.max_running_requests // self.num_micro_batches)

    @property
    def max_rows(self) -> int:
        """Requests that run at once: no more than micro-batches have room for. If all of these were
        full, a free row would tell priority preemption that no request has to leave."""
        room = self.num_micro_batches * self.max_micro_batch_size
        return min(self.engine.max_running_requests, room)
