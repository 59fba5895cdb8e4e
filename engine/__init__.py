"""Manta's inference engine: plain Python and torch; only `engine.actors` knows Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.constraints import structured
from engine.process.openmp import set_wait_policy
from engine.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__", "structured"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazy: the ingress and the tokenizer import engine modules and must not pay for torch.
    if name == "LLM":
        set_wait_policy()  # before torch is loaded
        from engine.llm import LLM

        return LLM
    raise AttributeError(name)
