"""Architecture names of config.json -> model classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.registry import Registry

if TYPE_CHECKING:
    from engine.models.llama import LlamaModel

# One decoder with switches in ModelConfig: biases, norms of q and k, sliding windows.
_LLAMA = "engine.models.llama:LlamaModel"

MODELS: Registry[type[LlamaModel]] = Registry(
    "architecture",
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": _LLAMA,
        "Qwen2ForCausalLM": _LLAMA,
        "Qwen3ForCausalLM": _LLAMA,
    },
)
