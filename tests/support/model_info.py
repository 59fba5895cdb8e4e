"""`ModelInfo`s without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.http.engine_client import ModelInfo
from tests.support.scheduler_configs import resolved_config


def model_info(
    name: str = "m",
    max_model_len: int = 64,
    vocab_size: int = 64,
    *,
    path: str | Path = "",
    hidden_size: int = 0,
    page_size: int = 1,
    **fields: Any,
) -> ModelInfo:
    """`fields` are those of `ModelInfo`."""
    shape = {"vocab_size": vocab_size, "path": Path(path), "hidden_size": hidden_size}
    return ModelInfo(name, resolved_config(max_model_len, shape, page_size=page_size), **fields)
