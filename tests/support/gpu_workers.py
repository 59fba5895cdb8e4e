"""Workers on a GPU for tests: with FlashInfer where it is installed, else with torch's attention.

torch's can't be captured in CUDA graphs; `CapturableAttention` stands in for it, as on CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.registry import ATTENTION_BACKENDS
from tests.support.fake_graphs import CapturableAttention


def graph_attention(patch: pytest.MonkeyPatch) -> str:
    """An `attention_backend` whose decodes can be captured here."""
    if importlib.util.find_spec("flashinfer") is not None:
        return "flashinfer"
    patch.setitem(ATTENTION_BACKENDS._entries, "torch", CapturableAttention)
    return "torch"


@contextmanager
def no_sync() -> Iterator[None]:
    """What would make the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
