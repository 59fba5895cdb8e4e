"""SmolLM2 135M Instruct in Q4_1, as `manta serve smollm2` fetches it, computes what transformers
computes of its dequantized weights: a real file, with real weights and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine import LLM, SamplingParams
from engine.checkpoint.folder import resolve_model_path
from engine.checkpoint.gguf.folder import source_files
from engine.llm import RequestOutput
from tests.support.engines import greedy_reference, reference_logprobs

NEW_TOKENS = 32
LIMIT = 1e-4
"""That log-probabilities may differ by, in nats. Our kernels round the inputs of these matrices:
that alone has given up to 0.00009."""
TEXT = (
    "The lighthouse stood at the end of a long pier of grey stone. Every evening its keeper, an "
    "old man named Tomas, climbed the ninety-two steps with a can of oil and a clean cloth. He "
    "wiped the glass, filled the lamp and waited for the first ship. In winter the storms came "
    "from the north, and the waves broke over the pier so that nobody could reach the village "
    "for days. Then he read his four books again, mended his nets and wrote letters to his "
    "daughter, who lived in a town far from the sea and had never seen the light burn. "
)
QUESTIONS = (
    "What is the capital of France, and which river flows through it? Answer in one sentence.",
    "Write a Python function that takes a list of numbers and returns the two largest of them, "
    "the largest first. Explain each line of it. What does it return for an empty list, and what "
    "for a list with one number?",
    TEXT + "Who is the keeper of the lighthouse, and what does he do in winter?",
    TEXT + TEXT.replace("Tomas", "Henrik") + "How do the two stories differ?",
)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    """transformers' Llama with what the `gguf` package makes of the file's blocks, in float64: all
    that differs is our rounding then."""
    folder = resolve_model_path("smollm2")
    config = LlamaConfig.from_pretrained(folder)
    (file,) = source_files(folder)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights = dict(model.named_parameters())  # a tied head isn't among them
    for name, parameter in weights.items():
        tensor = tensors.pop(names.get_name(name, try_suffixes=(".weight",)) or "")
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        count = heads.get(name.split(".")[-2])
        if count:  # llama.cpp has the two halves of a head's rows in pairs
            pairs = numbers.reshape(count, -1, 2, numbers.shape[-1])
            numbers = pairs.swapaxes(1, 2).reshape(numbers.shape)
        assert parameter.shape == numbers.shape, name
        parameter.data = torch.from_numpy(np.array(numbers, np.float32))
    assert not tensors, "tensors of the file that the reference lacks"
    return model.double()


def engine_of(**config: Any) -> LLM:
    return LLM(
        "smollm2",
        dtype="float32",
        device="cpu",
        kernels="cpu",
        max_total_tokens=4096,
        max_model_len=1024,
        **config,
    )


def answers(llm: LLM, questions: tuple[str, ...]) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
    chats = [[{"role": "user", "content": question}] for question in questions]
    return llm.chat(chats, params, use_tqdm=False)


class Expected:
    """transformers' answers, each computed once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], tuple[list[int], np.ndarray]] = {}

    def check(self, found: RequestOutput) -> float:
        """The largest difference of the log-probabilities of the answer's tokens."""
        prompt, (answer,) = found.prompt_token_ids, found.outputs
        key = tuple(prompt)
        if key not in self._known:
            (ids,) = greedy_reference(self._model, [prompt], NEW_TOKENS)
            rows = reference_logprobs(self._model, prompt + ids)[len(prompt) - 1 : -1]
            self._known[key] = ids, rows[np.arange(NEW_TOKENS), ids]
        ids, logprobs = self._known[key]
        assert answer.token_ids == ids
        given = np.array([entry.logprob for entry in answer.logprobs])
        return float(np.abs(given - logprobs).max())


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel) -> Expected:
    return Expected(reference)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine_of() as made:
        yield made


def test_tokens_and_logprobs(llm: LLM, expected: Expected) -> None:
    found = answers(llm, QUESTIONS)
    lengths = [len(each.prompt_token_ids) for each in found]
    assert 40 < min(lengths) < 60 and 250 < max(lengths) < 350, lengths
    assert max(map(expected.check, found)) < LIMIT


def test_a_prompt_from_the_cache(llm: LLM, expected: Expected) -> None:
    """The same prompt, and one that goes on otherwise after its text."""
    story = QUESTIONS[2]
    answers(llm, (story,))
    for question in (story, TEXT + "What does his daughter know of the light?"):
        (found,) = answers(llm, (question,))
        assert found.num_cached_tokens > 100
        assert expected.check(found) < LIMIT


@pytest.mark.parametrize("split", [{"tp_size": 3}, {"pp_size": 2}], ids=["tp3", "pp2"])
def test_several_workers(split: dict[str, int], expected: Expected) -> None:
    """Three divide the model's 9 heads (3 of keys and values); two can't."""
    with engine_of(**split) as llm:
        assert max(map(expected.check, answers(llm, QUESTIONS[:3]))) < LIMIT
