"""Quantized checkpoints are read as the numbers that they stand for, whole and in parts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.start.preflight import check_weights
from engine.config import EngineConfig
from engine.layers.weight_format import MatrixSlice
from engine.layers.weights import SafetensorsSource
from engine.memory_need import MemoryNeed, quantized_line
from engine.protocol.sampling_params import SamplingParams
from tests.support.engines import engine_for, greedy_reference, load_reference, reference_logprobs
from tests.support.models import make_model
from tests.support.quantized import (
    LINEARS,
    SIZES,
    compressed,
    make_forms,
    write,
    write_experts_float4,
)

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


def test_what_becomes_of_them_is_said(plain: Path, tmp_path: Path) -> None:
    """With the memory that it takes, and what of the format isn't followed."""
    quantized, reference = write(plain, FORMS["ct-int8"], tmp_path)

    def need(
        folder: Path,
        device: str = "cpu",
        kernels: str = "torch",
        dtype: str = "bfloat16",
        **keys: Any,
    ) -> MemoryNeed:
        engine = EngineConfig(model=str(folder), **keys)
        return MemoryNeed.of(engine.resolve(), dtype, engine.kernel_choice(kernels), device)

    def line(folder: Path, **config: Any) -> str:
        return quantized_line(need(folder, **config))

    assert line(reference) == ""
    kept = line(quantized, kernels="cpu")
    assert kept.startswith("compressed-tensors (int-quantized), kept as it is: ")
    said = line(quantized)
    for part in (
        "compressed-tensors (int-quantized), dequantized at load to bfloat16: ",
        "GiB instead of ",
        "activations aren't rounded",
    ):
        assert part in said, said
    float8, _ = write(plain, FORMS["fp8-blocks"], tmp_path / "float8")
    assert "kept as `quantization` says" in line(float8, kernels="cpu", quantization="int8")
    assert "kept so where our kernels have the form" in line(quantized, device="cuda")
    assert "dequantized at load to float32: " in line(quantized, dtype="float32", device="cuda")
    # A GPU may have room for no more than the files.
    stored = (quantized / "model.safetensors").stat().st_size
    assert need(quantized, device="cuda").rank_weights() == pytest.approx(stored, rel=1e-3)
    assert need(quantized).weights() == need(reference, device="cuda").weights() > stored


def test_groups_of_a_cut_are_halved(plain: Path, tmp_path: Path) -> None:
    """A rank's part of 128 inputs in groups of 128 may be 64: it has the group's scales, too."""
    form = compressed("pack-quantized", strategy="group", num_bits=4, group_size=64)
    quantized, _ = write(plain, form, tmp_path)
    source = SafetensorsSource(quantized, torch.float32, CPU)
    name = "model.layers.0.mlp.down_proj"
    for start, count, group in ((0, 96, 32), (96, 96, 32), (64, 64, 64), (80, 32, 32), (48, 32, 0)):
        found = source.quantized(MatrixSlice(name, 64, 192, 1, start, count))
        assert (0 if found is None else found.group) == group
        if found is not None:
            part = source.get(f"{name}.weight", (64, 192), dim=1, start=start, count=count)
            assert torch.equal(found.dequantize(torch.float32), part)


def test_quantized_matrices_can_be_kept_as_int8(plain: Path, tmp_path: Path) -> None:
    """`quantization: int8` rounds what a slice stands for, as of a plain checkpoint."""
    quantized, reference = write(plain, FORMS["gptq"], tmp_path)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    found = []
    for folder in (quantized, reference):
        with engine_for(folder, quantization="int8") as engine:
            found.append(engine.run([PROMPT], params))
    assert found[0] == found[1]


def test_groups_of_modules_have_bits_of_their_own(plain: Path, tmp_path: Path) -> None:
    """The group that names a module by an expression comes before the one of its class."""
    folder, groups = tmp_path / "mixed", {}
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, is_mlp in (("ct-w4", True), ("ct-w8-channel", False)):
        quantized, reference = write(plain, FORMS[name], tmp_path / name)
        for tensors, at in ((stored, quantized), (meant, reference)):
            whole = load_file(at / "model.safetensors")
            tensors |= {k: v for k, v in whole.items() if (".mlp." in k) == is_mlp}
        config = json.loads((quantized / "config.json").read_text())
        groups[name] = config["quantization_config"]["config_groups"]["group_0"]
    groups["ct-w4"]["targets"] = ["re:.*mlp.*"]
    config["quantization_config"]["config_groups"] = dict(reversed(groups.items()))
    shutil.copytree(plain, folder)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    source = SafetensorsSource(folder, torch.float32, CPU)
    assert all(torch.equal(source.read(name).float(), wanted) for name, wanted in meant.items())


def test_a_matrix_may_lie_in_several_files(plain: Path, tmp_path: Path) -> None:
    """As where shards end in the middle of a layer."""
    quantized, reference = write(plain, FORMS["gptq-order"], tmp_path)
    (quantized / "model.safetensors").rename(tmp_path / "all")
    tensors = sorted(load_file(tmp_path / "all").items())
    weight_map = {}
    for number in range(3):
        file = f"model-{number}.safetensors"
        save_file(dict(tensors[number::3]), quantized / file)
        weight_map |= {name: file for name, _ in tensors[number::3]}
    index = {"weight_map": weight_map}
    (quantized / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weights(quantized)
    source = SafetensorsSource(quantized, torch.float32, CPU)
    for name, wanted in load_file(reference / "model.safetensors").items():
        assert torch.equal(source.read(name), wanted)
