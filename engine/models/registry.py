"""Architecture names of config.json -> model classes."""

from __future__ import annotations

from engine.errors import ConfigError
from engine.models.llama import LlamaModel

# One decoder with switches in ModelConfig: biases, norms of q and k, sliding windows.
_MODELS: dict[str, type[LlamaModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
    "Qwen3ForCausalLM": LlamaModel,
}


def model_class(architecture: str) -> type[LlamaModel]:
    """Raises `ConfigError` naming the supported architectures."""
    try:
        return _MODELS[architecture]
    except KeyError as error:
        raise ConfigError(
            f"architecture {architecture} is not supported; supported are {', '.join(_MODELS)}."
        ) from error
