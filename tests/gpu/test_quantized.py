"""Quantized matrices on a GPU: the kernels in Triton, and whole engines with them.

tests/unit/layers/test_gpu_kernel runs the same kernels by Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.device.flashinfer_loader import flashinfer_installed
from engine.device.triton_loader import lack_of_triton
from engine.layers.gpu_kernel import FUSED_ROWS, GpuKernel
from engine.layers.grouped_experts import GroupedExperts
from engine.protocol.sampling_params import SamplingParams
from engine.worker.step_queue import StepQueue
from tests.support.engines import engine_for, load_reference, reference_logprobs
from tests.support.gpu_weights import (
    Case,
    check_experts,
    check_product,
    ends_of,
    experts_of,
    meant,
    rows_for,
)
from tests.support.gpu_workers import graph_attention, no_sync
from tests.support.models import make_model
from tests.support.quantized import (
    LINEARS,
    Form,
    float8_whole,
    gptq,
    make_forms,
    write,
    write_experts_float4,
)
from tests.support.worker_driver import Steps, make_worker

DEVICE = torch.device("cuda")
CASES = (
    Case(4, 128, outputs=1000, inputs=2048),
    Case(4, 32, has_mins=True, outputs=1000, inputs=2048),
    Case(8, 0, outputs=1000, inputs=2048),
    Case("float4", 16, outputs=1000, inputs=2048),
    Case("float8", 0, outputs=1000, inputs=2048),
)
"""Few, because each is compiled for each tile. Inputs are split among programs."""
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
FORMS = {"gptq": Form(_GPTQ, gptq(4, 32)), "fp8": Form(_FP8, float8_whole)}
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
MEAN_ERROR, MOST_ERRORS = 0.3, 1.0
"""Of log-probabilities in nats, as in test_architectures."""
PROMPT = [3, 50, 7, 120, 9, 11, 200, 45, 6, 18, 77, 31, 90, 14, 2, 160, 33, 8, 21, 5, 64, 99, 101]

if lack_of_triton():
    pytest.skip(lack_of_triton(), allow_module_level=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    return make_model(folder, "LlamaForCausalLM", **SIZES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Case) -> None:
    kernel = GpuKernel([case.weight(DEVICE)], None)
    for num_rows in (0, 1, 7, 16, 33, 200):
        check_product(kernel, num_rows, torch.bfloat16)
    check_product(kernel, FUSED_ROWS + 1, torch.bfloat16, is_plain=True)


def test_products_in_float16() -> None:
    kernel = GpuKernel([CASES[0].weight(DEVICE)], torch.randn(1000, device=DEVICE).half())
    check_product(kernel, 16, torch.float16)


def test_rows_that_do_not_fill_a_chunk() -> None:
    kernel = GpuKernel([Case(4, 0, inputs=200, outputs=129).weight(DEVICE)], None)
    check_product(kernel, 5, torch.bfloat16)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_numbers(case: Case) -> None:
    weight = case.weight(DEVICE)
    kernel, exact = GpuKernel([weight], None), meant(weight)
    found = kernel.dequantize(torch.bfloat16).cpu()
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)
    ids = torch.tensor([5, 0, 999, 5], device=DEVICE)
    assert torch.equal(kernel.rows(ids, torch.bfloat16).cpu(), found[ids.cpu()])


def test_a_row_has_the_same_result_in_every_batch_of_a_tile() -> None:
    kernel = GpuKernel([CASES[0].weight(DEVICE)], None)
    x = rows_for(kernel.weights[0], 16, torch.bfloat16)
    found = kernel(x)
    for start, stop in ((0, 1), (3, 10), (15, 16)):
        assert torch.equal(kernel(x[start:stop]), found[start:stop])


def test_products_are_captured_and_never_wait() -> None:
    kernel = GpuKernel([CASES[0].weight(DEVICE)], None)
    kernel.compile(torch.bfloat16)
    for num_rows in (1, 16, 200):
        x = rows_for(kernel.weights[0], num_rows, torch.bfloat16).contiguous()
        with no_sync():
            kernel(x)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = kernel(x)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(captured, kernel(x))


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3], CASES[4]], ids=str)
def test_products_of_experts(case: Case) -> None:
    """In all tiles, with experts that have no rows."""
    for counts in ((0, 0, 1, 0), (3, 0, 17, 40), (0, 300, 1, 5), (400, 500, 200, 3)):
        check_experts(experts_of(case, 4, DEVICE, torch.bfloat16), counts, torch.bfloat16)


def test_products_of_experts_are_captured_and_never_wait() -> None:
    """Which expert has which rows is the graph's input."""
    experts = experts_of(CASES[3], 4, DEVICE)
    experts.compile(torch.bfloat16)
    for num_rows in (1, 16, 200):
        x = rows_for(experts.weight, num_rows, torch.bfloat16).contiguous()
        ends = ends_of((0, num_rows, 0, 0), DEVICE)
        with no_sync():
            experts(x, ends)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = experts(x, ends)
        for most in (0, num_rows // 2, num_rows):
            x.copy_(torch.randn_like(x))
            ends.copy_(ends_of((0, most, 0, num_rows - most), DEVICE))
            graph.replay()
            assert torch.equal(captured, experts(x, ends))


@pytest.mark.parametrize("name", FORMS)
def test_engines_stay_near_the_dequantized_model(name: str, plain: Path, tmp_path: Path) -> None:
    """With FlashInfer and CUDA graphs; prompts are longer and shorter than graphs are wide."""
    check_engine(*write(plain, FORMS[name], tmp_path))


MODEL = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "num_hidden_layers": 2}
QWEN = {**MODEL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq", "mxfp4"])
def test_mixtures_keep_their_experts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the checkpoint has them, and their steps are captured."""
    made: list[GroupedExperts] = []
    plain_init = GroupedExperts.__init__
    monkeypatch.setattr(
        GroupedExperts,
        "__init__",
        lambda self, *args: (made.append(self), plain_init(self, *args))[1],
    )
    if name == "mxfp4":
        plain = make_model(tmp_path / "plain", "GptOssForCausalLM", **MODEL, num_local_experts=8)
        written = write_experts_float4(plain, tmp_path)
    else:
        plain = make_model(tmp_path / "plain", "Qwen3MoeForCausalLM", **QWEN)
        written = write(plain, make_forms()[name], tmp_path)
    check_engine(*written)
    assert len(made) == 2
    for mixture in made:
        assert sorted(mixture.packed) == ["down_proj", "gate_up_proj"]


def check_engine(quantized: Path, reference: Path) -> None:
    """Log-probabilities of what the engine says are near those of the dequantized model."""
    if not flashinfer_installed():
        pytest.skip("needs flashinfer-python")
    model = load_reference(reference)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    prompts = [PROMPT, PROMPT[:5], PROMPT[4:20]]
    with engine_for(quantized, device="cuda", dtype="bfloat16", kernels="flashinfer") as engine:
        outputs = engine.run(prompts, params)
        errors: list[float] = []
        for number, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
            wanted = reference_logprobs(model, prompt + tokens)[len(prompt) - 1 : -1]
            mine = [entry.logprob for entry in engine.logprobs[number]]
            errors += [*np.abs(wanted[np.arange(len(tokens)), tokens] - mine)]
    assert np.mean(errors) < MEAN_ERROR
    assert np.quantile(errors, 0.9) < MOST_ERRORS


@pytest.mark.parametrize("name", FORMS)
def test_matrices_take_what_they_take_in_the_files(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And steps with them, captured or not, never wait for the device."""
    quantized, _ = write(plain, FORMS[name], tmp_path)
    backend = graph_attention(monkeypatch)
    worker = make_worker(
        quantized,
        device="cuda",
        dtype="bfloat16",
        attention_backend=backend,
        max_batch_size=4,
    )
    tensors = load_file(quantized / "model.safetensors")
    stored = sum(x.nbytes for name, x in tensors.items() if {*name.split(".")} & {*LINEARS})
    model = worker.runner.model
    kernels = [
        kernel
        for layer in model.layers
        for kernel in (
            layer.attention.qkv.kernel,
            layer.attention.o.kernel,
            layer.mlp.gate_up.kernel,
            layer.mlp.down.kernel,
        )
    ]
    assert all(isinstance(kernel, GpuKernel) for kernel in kernels)
    assert sum(kernel.num_bytes for kernel in kernels) <= 1.15 * stored
    queue = StepQueue(worker)
    steps = Steps(lambda number: SamplingParams(temperature=0.0), seed=1)
    for target in (3, 3, 8, 8, 2):
        batch, _ = steps.next(target)
        with no_sync():
            queue.launch(batch)
        while len(queue._launched) > 1:
            assert queue.take_oldest() is not None
