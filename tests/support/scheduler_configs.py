"""`SchedulerConfig`s without a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig, ResolvedConfig
from engine.scheduler.scheduler_config import SchedulerConfig
from tests.support.source_files import ROOT


@dataclass(frozen=True)
class _AnyShape(SchedulerConfig):
    """As many steps in flight and micro-batches as a test likes."""

    lookahead: int = 1
    num_micro_batches: int = 1
    max_micro_batch_size: int = 256


def scheduler_config(
    *,
    num_kv_tokens: int = 256,
    max_model_len: int = 64,
    vocab_size: int = 64,
    eos_token_ids: tuple[int, ...] = (),
    lookahead: int = 1,
    num_micro_batches: int = 1,
    max_micro_batch_size: int = 256,
    window: int | None = None,
    **keys: Any,
) -> SchedulerConfig:
    """`keys` are those of `EngineConfig`; what its `resolve` would refuse isn't refused. `window`:
    that of every layer but one."""
    shape: dict[str, Any] = {"vocab_size": vocab_size, "eos_token_ids": eos_token_ids}
    if window is not None:
        shape["layer_windows"] = (None, window, window)
    return _AnyShape(
        resolved_config(max_model_len, shape, **keys),
        num_kv_tokens,
        lookahead,
        num_micro_batches,
        max_micro_batch_size,
    )


def resolved_config(max_model_len: int, shape: dict[str, Any], **keys: Any) -> ResolvedConfig:
    """`shape` are fields of `ModelConfig`, `keys` those of `EngineConfig`."""
    engine = EngineConfig(**{"page_size": 1, **keys})
    return ResolvedConfig(engine, replace(_model(), **shape), max_model_len, "last")


@lru_cache
def _model() -> ModelConfig:
    return ModelConfig.from_pretrained(ROOT / "models" / "manta-small")
