"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop strings."""

from __future__ import annotations

from engine.tokenizer.detokenizer_manager import DetokenizerManager
from engine.tokenizer.tokenizer import Tokenizer

__all__ = ["DetokenizerManager", "Tokenizer"]
