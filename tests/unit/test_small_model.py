"""The model that the repository carries: loads offline, fits its limits, and has learned English.

The texts of the loss test are docstrings of modules that training never saw
(`HELD_OUT_MODULES` in scripts/small_model_corpus.py), copied so that the interpreter's patch
version doesn't matter.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

MODEL = Path(__file__).parents[2] / "models" / "manta-small"
HELD_OUT_TEXTS = (
    # textwrap.fill
    "Fill a single paragraph of text, returning a new string.\n\n"
    "Reformat the single paragraph in 'text' to fit in lines of no more\n"
    "than 'width' columns, and return a new string containing the entire\n"
    "wrapped paragraph.",
    # fnmatch.fnmatch
    "Test whether FILENAME matches PATTERN.\n\n"
    "Patterns are Unix shell style:\n\n"
    "*       matches everything\n"
    "?       matches any single character\n",
    # sched.scheduler.enter
    "A variant that specifies the time as a relative time.\n\n"
    "This is actually the more commonly used interface.",
    # graphlib.TopologicalSorter.add
    "Add a new node and its predecessors to the graph.\n\n"
    "Both the *node* and all elements in *predecessors* must be hashable.\n\n"
    "If called multiple times with the same node argument, the set of dependencies\n"
    "will be the union of all dependencies passed in.",
)
# Nats a token: a uniform guess costs ln(4096) = 8.3, the training data's token frequencies alone
# 7.4, the committed weights 4.4.
MAX_HELD_OUT_LOSS = 5.0


@pytest.fixture(autouse=True)
def offline_single_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


@functools.cache
def load_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        MODEL, local_files_only=True, dtype=torch.float32
    ).eval()


def mean_loss(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, text: str) -> float:
    """Mean negative log likelihood in nats per token, the first token given BOS."""
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


def test_fits_the_limits_of_the_repository() -> None:
    config = AutoConfig.from_pretrained(MODEL, local_files_only=True)
    assert config.model_type == "llama"
    assert config.vocab_size == 4096
    assert config.max_position_embeddings >= 2048
    weights = MODEL / "model.safetensors"
    assert weights.stat().st_size <= 16 * 1024 * 1024
    with safe_open(weights, framework="pt") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
        dtypes = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    assert dtypes == {"BF16"}
    assert 3_000_000 <= sum(math.prod(shape) for shape in shapes) <= 8_000_000


def test_tokenizer_has_the_models_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 4096
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer.eos_token == "<|end_of_text|>"
    stops = GenerationConfig.from_pretrained(MODEL, local_files_only=True).eos_token_id
    assert stops == tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|end|>"])


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=300)
def test_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = load_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert all(0 <= token < 4096 for token in ids)
    assert tokenizer.decode(ids) == text


def test_chat_template_renders_every_role(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " What does len do? "},
        {"role": "assistant", "content": "Return the number of items."},
        {"role": "user", "content": "And max?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin_of_text|><|system|>\nBe brief.<|end|>\n"
        "<|user|>\nWhat does len do?<|end|>\n"
        "<|assistant|>\nReturn the number of items.<|end|>\n"
        "<|user|>\nAnd max?<|end|>\n<|assistant|>\n"
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|end|>")) == 4
    with pytest.raises(Exception, match="unknown role function"):
        tokenizer.apply_chat_template([{"role": "function", "content": ""}], tokenize=False)


def test_chat_template_renders_tools(tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages = [
        {"role": "user", "content": "Add 1 and 2."},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "3"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in text
    assert f"<|assistant|>\n{written}\n{written}<|end|>\n" in text
    assert "<|user|>\n<tool_response>\n3\n</tool_response><|end|>\n" in text


def test_predicts_docstrings_it_never_saw(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast
) -> None:
    losses = [mean_loss(model, tokenizer, text) for text in HELD_OUT_TEXTS]
    assert sum(losses) / len(losses) < MAX_HELD_OUT_LOSS


def test_uses_a_context_of_2048_tokens(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Text far into a long context costs no more than the same text alone, and some slack."""
    text = "\n\n".join(HELD_OUT_TEXTS)
    filler = (MODEL / "README.md").read_text(encoding="utf-8")
    ids = tokenizer((filler + "\n") * 20, add_special_tokens=False)["input_ids"]
    tail = tokenizer(text, add_special_tokens=False)["input_ids"]
    row = torch.tensor([[tokenizer.bos_token_id, *ids[: 2047 - len(tail)], *tail]])
    labels = row.clone()
    labels[:, : -len(tail)] = -100
    with torch.no_grad():
        far = model(input_ids=row, labels=labels).loss.item()
    assert row.shape == (1, 2048)
    assert far < mean_loss(model, tokenizer, text) + 0.5
