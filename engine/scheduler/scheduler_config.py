"""What the scheduler needs of the configuration, checked and resolved."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig, ResolvedConfig
from engine.errors import ConfigError
from engine.speculative.config import SpeculativeConfig


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes in tokens and requests; see docs/configuration.md for each."""

    num_kv_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    page_size: int = 1
    max_running_requests: int = 256
    max_queued_requests: int = 2048
    chunked_prefill_size: int | None = 512
    max_prefill_tokens: int = 16384
    enable_dynamic_chunking: bool = False
    enable_mixed_chunk: bool = True
    schedule_policy: str = "lpm"
    schedule_conservativeness: float = 1.0
    enable_priority_preemption: bool = False
    enable_prefix_cache: bool = True
    eviction_policy: str = "lru"
    enable_kv_events: bool = False
    lookahead: int = 1
    num_micro_batches: int = 1
    max_micro_batch_size: int = 256
    pp_size: int = 1
    speculative: SpeculativeConfig | None = None
    queue_timeout_s: float | None = None
    request_timeout_s: float | None = None

    def __post_init__(self) -> None:
        usable = self.num_kv_tokens // self.page_size * self.page_size
        if usable < self.max_model_len:
            raise ConfigError(
                f"the KV cache ({usable} tokens) can't hold one request of max_model_len "
                f"({self.max_model_len}); raise max_total_tokens or lower max_model_len."
            )
        spare = 0 if self.speculative is None else self.speculative.spare_tokens
        if usable < self.max_model_len + spare:
            raise ConfigError(
                f"the KV cache ({usable} tokens) can't hold one request of max_model_len "
                f"({self.max_model_len}) and {spare} tokens of drafts (two steps of "
                "num_speculative_tokens + 1); raise max_total_tokens, or lower max_model_len or "
                "num_speculative_tokens."
            )

    @classmethod
    def from_config(cls, config: ResolvedConfig, num_kv_tokens: int) -> SchedulerConfig:
        """Make it from a resolved engine config and the KV size that the workers decided."""
        engine: EngineConfig = config.engine
        chunk = engine.chunked_prefill_size
        count = engine.num_micro_batches
        running = engine.max_running_requests
        per_micro_batch = engine.pp_max_micro_batch_size or -(-running // count)
        return cls(
            num_kv_tokens=num_kv_tokens,
            max_model_len=config.max_model_len,
            vocab_size=config.model.vocab_size,
            eos_token_ids=config.model.eos_token_ids,
            page_size=engine.page_size,
            # No more rows than micro-batches have room for. If all of these were full, a free row
            # would tell priority preemption that no request has to leave.
            max_running_requests=min(running, count * per_micro_batch),
            max_queued_requests=engine.max_queued_requests,
            chunked_prefill_size=chunk if chunk > 0 else None,
            max_prefill_tokens=engine.max_prefill_tokens,
            enable_dynamic_chunking=engine.enable_dynamic_chunking,
            enable_mixed_chunk=engine.enable_mixed_chunk,
            schedule_policy=engine.schedule_policy,
            schedule_conservativeness=engine.schedule_conservativeness,
            enable_priority_preemption=engine.enable_priority_preemption,
            enable_prefix_cache=engine.enable_prefix_cache,
            eviction_policy=engine.eviction_policy,
            enable_kv_events=engine.enable_kv_events,
            lookahead=engine.lookahead,
            num_micro_batches=count,
            max_micro_batch_size=per_micro_batch,
            pp_size=engine.pp_size,
            speculative=engine.speculative_config,
            queue_timeout_s=engine.queue_timeout_s,
            request_timeout_s=engine.request_timeout_s,
        )
