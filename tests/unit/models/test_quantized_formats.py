"""Quantized checkpoints are read as the numbers that they stand for, whole and in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.layers.weight_format import MatrixSlice
from engine.layers.weights import SafetensorsSource
from engine.protocol.sampling_params import SamplingParams
from tests.support.engines import engine_for, greedy_reference, load_reference, reference_logprobs
from tests.support.models import make_model
from tests.support.quantized import LINEARS, SIZES, make_forms, write, write_experts_float4

CPU = torch.device("cpu")
FORMS = make_forms()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    return make_model(folder, "LlamaForCausalLM", **SIZES)


@pytest.mark.parametrize("name", FORMS)
def test_parts_are_those_of_the_whole(name: str, plain: Path, tmp_path: Path) -> None:
    """Rows and columns from and to odd places, too, which cut through groups and bytes."""
    form = FORMS[name]
    quantized, reference = write(plain, form, tmp_path)
    source = SafetensorsSource(quantized, torch.float32, CPU)
    meant = load_file(reference / "model.safetensors")
    assert sorted(source.names()) == sorted(meant)
    grouped = 0
    for weight, wanted in meant.items():
        assert torch.equal(source.read(weight).float(), wanted), weight
        if weight.split(".")[-2] not in LINEARS or ".0." not in weight:
            continue
        for dim in (0, 1):
            size = wanted.shape[dim]
            for start, stop in (
                (0, size),
                (0, size // 2),
                (size // 2, size),
                (5, 23),
                (size - 1, size),
            ):
                place = {"dim": dim, "start": start, "count": stop - start}
                part = source.get(weight, tuple(wanted.shape), **place)
                assert torch.equal(part, wanted.narrow(dim, start, stop - start))
                piece = MatrixSlice(weight.removesuffix(".weight"), *wanted.shape, **place)
                found = source.quantized(piece)
                if found is not None:
                    grouped += 1
                    torch.testing.assert_close(found.dequantize(torch.float32), part)
                    assert int(found.numbers.max()) < 1 << found.bits
    assert (grouped > 0) == form.keeps_grouped


@contextmanager
def compared(
    quantized: Path, reference: Path, **config: Any
) -> Iterator[Callable[[Sequence[int]], None]]:
    """Compares Manta on one folder with transformers on the other: tokens and log-probabilities,
    also of a prompt whose beginning is in the prefix cache."""
    model = load_reference(reference)
    with engine_for(quantized, **config) as engine:

        def compare(prompt: Sequence[int]) -> None:
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
            wanted = greedy_reference(model, [prompt], 8)
            assert engine.run([prompt], params) == wanted
            assert engine.run([prompt], params, warm=[prompt[:20]]) == wanted
            assert engine.cached[0] > 0
            table = reference_logprobs(model, [*prompt, *wanted[0]])
            for place, found in enumerate(engine.logprobs[0]):
                row = table[len(prompt) - 1 + place]
                assert abs(found.logprob - row[wanted[0][place]]) < 1e-4

        yield compare


PROMPT = [3, 50, 7, 120, 9, 11, 200, 45, 6, 18, 77, 31, 90, 14, 2, 160, 33, 8, 21, 5, 64, 99, 101]


@pytest.mark.parametrize("name", FORMS)
def test_tokens_of_a_llama(name: str, plain: Path, tmp_path: Path) -> None:
    quantized, reference = write(plain, FORMS[name], tmp_path)
    with compared(quantized, reference) as compare:
        compare(PROMPT)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("ct-w4-zeros", {"tp_size": 2}),
        ("gptq-order", {"tp_size": 2}),
        ("awq", {"pp_size": 2}),
    ],
)
def test_ranks_have_their_shares(
    name: str, split: dict[str, int], plain: Path, tmp_path: Path
) -> None:
    quantized, reference = write(plain, FORMS[name], tmp_path)
    with compared(quantized, reference, **split) as compare:
        compare(PROMPT)


MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 16,
    **SIZES,
}


def test_a_mixture_through_transformers(tmp_path: Path) -> None:
    """Its code merges experts, whose matrices are quantized one by one."""
    plain = make_model(tmp_path / "plain", "Qwen3MoeForCausalLM", **MIXTURE)
    quantized, reference = write(plain, FORMS["fp8-blocks"], tmp_path)
    with compared(quantized, reference) as compare:
        compare(PROMPT)


def test_gpt_oss_has_stacked_experts(tmp_path: Path) -> None:
    sizes = {**SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    plain = make_model(tmp_path / "plain", "GptOssForCausalLM", sliding_window=24, **sizes)
    quantized, reference = write_experts_float4(plain, tmp_path)
    source = SafetensorsSource(quantized, torch.float32, CPU)
    meant = load_file(reference / "model.safetensors")
    assert sorted(source.names()) == sorted(meant)
    for name, wanted in meant.items():
        assert torch.equal(source.read(name), wanted), name
        for dim in range(wanted.ndim):
            place = {"dim": dim, "start": 1, "count": min(wanted.shape[dim] - 1, 41)}
            part = source.get(name, tuple(wanted.shape), **place)
            assert torch.equal(part, wanted.narrow(dim, 1, place["count"])), name
    with compared(quantized, reference, tp_size=2) as compare:
        compare(PROMPT)
