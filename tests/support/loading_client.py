"""A client that notes which adapters it is told to load, and a call of each endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from engine.errors import RequestError
from tests.support.fake_client import FakeEngineClient

CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
}


def write_adapter(folder: Path) -> str:
    """A folder in PEFT's format."""
    folder.mkdir(parents=True)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{prefix}{side}.weight": np.ones((4, 4), np.float32) for side in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    return str(folder)


class LoadingClient(FakeEngineClient):
    """Notes what it is told to load."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.lacking: list[str] = []
        self.refusal: RequestError | None = None

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> list[str]:
        self.calls.append((name, path, replace))
        if self.refusal is not None:
            raise self.refusal
        return self.lacking

    async def unload_adapter(self, name: str) -> None:
        self.calls.append((name,))
