"""Thousands of damaged GGUF files: each is read, or refused in a sentence, and quickly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from tests.support.gguf_files import write_gguf
from tests.support.gguf_fuzz import refusals
from tests.support.models import make_model
from tests.support.tiny_tokenizers import write_byte_level

SIZES = {"num_hidden_layers": 1, "vocab_size": 430, "hidden_size": 16, "intermediate_size": 16}
LIMIT_S = 0.05
"""Of one file, on average."""


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("num_files", [30_000, pytest.param(100_000, marks=pytest.mark.full_chaos)])
def test_damaged_files(tmp_path: Path, num_files: int) -> None:
    model = make_model(tmp_path / "model", "LlamaForCausalLM", **SIZES)
    tokenizer = write_byte_level(tmp_path / "tokenizer")
    split = {"tokenizer.ggml.pre": "llama-bpe"}
    file = tmp_path / "model.gguf"
    write_gguf(file, model, Kind.F16, tokenizer=tokenizer, metadata=split)
    began = time.monotonic()
    assert refusals(file, range(10**6, 10**6 + num_files)) > num_files // 2
    assert time.monotonic() - began < num_files * LIMIT_S
