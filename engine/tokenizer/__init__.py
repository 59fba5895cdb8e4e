"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop strings."""

from __future__ import annotations

from engine.protocol.tokenizer_messages import LogprobEntry, TextDelta
from engine.tokenizer.detokenizer import IncrementalDetokenizer
from engine.tokenizer.detokenizer_manager import DetokenizerManager
from engine.tokenizer.stop import StopChecker
from engine.tokenizer.tokenizer import Tokenizer

__all__ = [
    "DetokenizerManager",
    "IncrementalDetokenizer",
    "LogprobEntry",
    "StopChecker",
    "TextDelta",
    "Tokenizer",
]
