"""The kernels in Triton, run by its interpreter on CPU, draw what plain torch draws.

Triton comes with the extra `triton`. On a machine with a GPU, tests/gpu/test_triton_sampling.py
runs them there.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.sampling_params import SamplingParams
from engine.sampling.base import Drawn, SamplingBackend
from engine.sampling.hash_noise import HashNoise, mix_seed
from engine.sampling.state import SamplingState
from engine.sampling.torch_backend import TorchSampling
from engine.sampling.triton_backend import HELD, MAX_CHUNKS, TritonSampling, chunk_sizes
from tests.support.sampler_rows import CPU, FILTERS, Row, random_logits, reference_scores
from tests.support.source_files import ROOT
from tests.support.triton_interpreter import use_interpreter

use_interpreter()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from engine.sampling import triton_kernels  # noqa: E402


def draw(
    backend: type[SamplingBackend],
    rows: list[Row],
    programs: int = 1,
    dtype: torch.dtype = torch.float32,
    picked: int | None = None,
) -> Drawn:
    """`programs` share the logits of a step, at least one for each row; one holds the tokens of
    `picked` chunks."""
    state = SamplingState(len(rows), len(rows[0].logits), CPU)
    state.install([row.install(slot) for slot, row in enumerate(rows)])
    sampling = backend(state.draw)
    if isinstance(sampling, TritonSampling):
        sampling._programs = programs
        sampling.sizes = sampling.sizes._replace(picked=picked or sampling.sizes.picked)
    numbers = np.arange(len(rows))
    return sampling.sample(
        torch.stack([row.logits for row in rows]).to(dtype),
        state.plan(numbers).draw,
        torch.from_numpy(numbers),
        torch.tensor([row.seq_len for row in rows]),
    )


def check_same(rows: list[Row], programs: int = 1, picked: int | None = None) -> None:
    """Equal tokens, or ones that are equally good up to float32 rounding."""
    wanted = draw(TorchSampling, rows)
    found = draw(TritonSampling, rows, programs, picked=picked)
    assert torch.equal(found.max_logit, wanted.max_logit)
    assert found.token_ids.dtype == torch.int64 and found.max_logit.dtype == torch.float32
    pairs = zip(found.token_ids.tolist(), wanted.token_ids.tolist(), strict=True)
    for row, (token, other) in zip(rows, pairs, strict=True):
        if token != other:
            plain = Row(row.logits, row.params, output=[0] * (row.seq_len - 4))
            scores = reference_scores(plain)
            assert abs(scores[token] - scores[other]) < 1e-4, (row.params, token, other)


def plain_rows(count: int, vocab: int, spread: float = 2.0, temperature: float = 0.8) -> list[Row]:
    """Rows that use every filter, and nothing but filters."""
    return [
        Row(
            random_logits(seed, spread, vocab),
            SamplingParams(
                temperature=temperature if seed % 13 else 0.0, seed=seed, **FILTERS[seed % 12]
            ),
        )
        for seed in range(count)
    ]


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("vocab", [17, 512])
def test_mixed_batch(vocab: int, spread: float) -> None:
    check_same(plain_rows(36, vocab, spread))


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_programs_share_a_row(spread: float) -> None:
    """A vocabulary of several blocks, the last one not full; how it is split changes nothing."""
    rows = plain_rows(13, 5000, spread)
    check_same(rows, 3 * len(rows))
    check_same(rows, picked=64)
    alone = draw(TritonSampling, rows)
    for programs in (2 * len(rows), 3 * len(rows)):
        assert torch.equal(draw(TritonSampling, rows, programs).token_ids, alone.token_ids)


def test_ties_are_broken_by_id() -> None:
    """Logits of a bfloat16 model: many equal ones at the edge of top_k and top_p."""
    rows = plain_rows(36, 512)
    for row in rows:
        row.logits = (row.logits * 2.0).round() / 2.0
    check_same(rows)
    logits = torch.zeros(512)
    logits[[100, 200, 300, 400]] = 5.0
    for filters in ({"top_k": 2}, {"top_p": 0.2}, {"top_k": 2, "top_p": 0.9}):
        tied = [Row(logits, SamplingParams(seed=seed, **filters)) for seed in range(12)]
        found = draw(TritonSampling, tied).token_ids
        assert torch.equal(found, draw(TorchSampling, tied).token_ids)
        assert set(found.tolist()) == {100, 200}


@pytest.mark.parametrize("picked", [1, 4])
@pytest.mark.parametrize(
    ("filters", "kept"),
    [({"top_k": 9}, 9), ({"top_p": 0.25}, 10), ({"top_k": 18, "top_p": 0.5}, 9)],
    ids=str,
)
def test_the_edge_is_exact(filters: dict[str, float], kept: int, picked: int) -> None:
    """All of 40 tokens are equally likely, so each that is kept is drawn, and no other."""
    rows = [Row(torch.ones(40), SamplingParams(seed=seed, **filters)) for seed in range(60)]
    found = draw(TritonSampling, rows, picked=picked).token_ids
    assert torch.equal(found, draw(TorchSampling, rows).token_ids)
    assert set(found.tolist()) == set(range(kept))


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.full((64,), -1.0)
    logits[[7, 11, 30]] = torch.tensor([-0.0, 0.0, -0.0])
    params = [SamplingParams(temperature=0.0)]
    params += [SamplingParams(seed=seed, top_k=2) for seed in range(9)]
    found = draw(TritonSampling, [Row(logits, each) for each in params]).token_ids
    assert found[0] == 7
    assert set(found.tolist()) == {7, 11}


def test_masked_rows() -> None:
    """A grammar leaves few tokens, fewer than top_k."""
    rows = plain_rows(24, 512)
    for i, row in enumerate(rows):
        masked = torch.full((512,), -torch.inf)
        allowed = [(37 * i + 101 * j) % 512 for j in range(1 + i % 5)]
        masked[allowed] = row.logits[allowed]
        row.logits = masked
    check_same(rows)
    found = draw(TritonSampling, rows).token_ids
    assert all(row.logits[token] > -torch.inf for row, token in zip(rows, found, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None], ids=str)
def test_bad_logits_concern_their_row_only(bad: float | None) -> None:
    """`None`: no token is allowed."""
    rows = plain_rows(26, 5000)
    for row in rows[::2]:
        row.logits = row.logits.clone()
        row.logits[[3007, 3100] if bad is not None else slice(None)] = (
            -torch.inf if bad is None else bad
        )
    found = draw(TritonSampling, rows, 3 * len(rows))
    assert (found.max_logit - found.max_logit).isnan().tolist() == [i % 2 == 0 for i in range(26)]
    assert found.max_logit.isnan().tolist() == [i % 2 == 0 and bad != bad for i in range(26)]
    assert found.token_ids[::2].tolist() == [0 if bad is None else 3007] * 13
    assert torch.equal(found.token_ids[1::2], draw(TorchSampling, rows[1::2]).token_ids)


def test_bfloat16_logits() -> None:
    rows = plain_rows(24, 512)
    for row in rows:
        row.logits = row.logits.bfloat16().float()
    found = draw(TritonSampling, rows, dtype=torch.bfloat16)
    assert torch.equal(found.token_ids, draw(TorchSampling, rows).token_ids)
    assert found.max_logit.dtype == torch.float32


def test_rows_without_a_request_are_greedy() -> None:
    """Padding of a captured batch."""
    state = SamplingState(3, 64, CPU)
    logits = torch.stack([random_logits(seed, vocab=64) for seed in range(3)])
    rows = torch.zeros(3, dtype=torch.int64)
    plan = state.plan(np.zeros(3, dtype=np.int64)).draw
    found = TritonSampling(state.draw).sample(logits, plan, rows, torch.ones_like(rows))
    assert torch.equal(found.token_ids, logits.argmax(1))
    assert TritonSampling(state.draw).sample(logits[:0], plan, rows[:0], rows[:0])[0].shape == (0,)


@settings(max_examples=25)
@given(
    temperature=st.sampled_from([0.01, 0.3, 1.0, 2.5, 50.0]),
    top_k=st.sampled_from([-1, 2, 17, 80, 640]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    seed=st.integers(-(2**63), 2**63 - 1),
    levels=st.sampled_from([2, 8, 1000]),
    spread=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
    picked=st.sampled_from([1, 2, 4, 256]),
)
def test_any_parameters(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    levels: int,
    spread: float,
    picked: int,
) -> None:
    """Three positions of a request; few `levels` of logits tie. Where one program holds the tokens
    of a few chunks only, others are read as often as it takes."""
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    logits = (random_logits(seed % 1000, 1.0, 96) * levels).round() * (spread / levels)
    check_same([Row(logits, params, output=[0] * count) for count in range(3)], picked=picked)


@pytest.mark.parametrize("vocab", [17, 512, 32000, 128256, 131073, 151936, 262144, 1 << 20])
def test_sizes_of_chunks(vocab: int) -> None:
    sizes = chunk_sizes(vocab)
    assert sizes.chunk * sizes.chunks >= vocab
    assert sizes.chunks <= MAX_CHUNKS and sizes.chunk * sizes.picked == HELD
    assert all(size & (size - 1) == 0 for size in sizes)


@triton.jit
def _noise(uniforms, logs, seeds, positions, BLOCK: tl.constexpr):
    line = tl.program_id(0)
    ids = tl.arange(0, BLOCK)
    key = triton_kernels._row_key(tl.load(seeds + line), tl.load(positions + line))
    u = triton_kernels._uniform(key, ids)
    tl.store(uniforms + line * BLOCK + ids, u)
    tl.store(logs + line * BLOCK + ids, triton_kernels._log(u))


def test_noise_has_the_bits_of_the_other_backends() -> None:
    vocab, generator = 4096, torch.Generator().manual_seed(3)
    seeds = torch.tensor([mix_seed(seed) for seed in (0, 1, -1, 2**63 - 1, -(2**63), 12345)])
    positions = torch.tensor([0, 1, 131071, 2, 7, 40])
    positions[2:] += torch.randint(0, 1 << 20, (4,), generator=generator)
    found, logs = torch.empty(6, vocab), torch.empty(6, vocab)
    _noise[(6,)](found, logs, seeds, positions, BLOCK=vocab)
    noise = HashNoise(vocab, CPU)
    work = torch.empty((2, 6, vocab), dtype=torch.int32)
    wanted = noise.uniform(noise.row_keys(seeds, positions), None, work)
    assert torch.equal(found, wanted)
    exact = wanted.double().log()
    assert float(((logs - exact) / exact).abs().max()) < 3e-7


@triton.jit
def _log_of(logs, values, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(logs + lanes, triton_kernels._log(tl.load(values + lanes)))


def test_logarithms_next_to_1() -> None:
    """The hardware's own has no correct digit there; such tokens win."""
    values = 1.0 - torch.arange(1, 513).float() * 2.0**-24
    values = torch.cat([values, 2.0 ** -torch.arange(0, 32).float(), values * 0.5])
    values = torch.cat([values, torch.full((2048 - len(values),), 0.3)])
    logs = torch.empty(2048)
    _log_of[(1,)](logs, values, BLOCK=2048)
    exact = values.double().log()
    rest = exact != 0.0
    assert bool((logs[~rest] == 0.0).all())
    assert float(((logs - exact) / exact)[rest].abs().max()) < 3e-7


_COMPILE = """
import subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.sampling import triton_backend, triton_kernels

types = {name: "*i64" for name in ("peaks", "races", "ints", "rows", "positions", "token_ids")}
types |= {name: "*fp32" for name in ("max_logit", "floats", "tops")}
types |= {"masses": "*fp64", "picked": "*i32"}
types |= {"blocks": "i32", "splits": "i32"}
sizes = {"VOCAB": 128256, "SPLITS": triton_backend.MAX_SPLITS}
tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
kernels = {
    triton_kernels.find_peaks: triton_backend.WARPS,
    triton_kernels.run_races: triton_backend.WARPS,
    triton_kernels.settle: triton_backend.SETTLE_WARPS,
}
for kernel, warps in kernels.items():
    for logits in ("*fp32", "*bf16"):
        chunks = triton_backend.chunk_sizes(128256)
        constants = {**sizes, "BLOCK": triton_backend.BLOCK, "CHUNK": chunks.chunk}
        constants |= {"CHUNKS": chunks.chunks, "PICKED": chunks.picked}
        known = {**types, "logits": logits, **dict.fromkeys(constants, "constexpr")}
        signature = {name: known[name] for name in kernel.arg_names}
        pointers = [i for i, name in enumerate(kernel.arg_names) if known[name][0] == "*"]
        source = ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={name: constants[name] for name in signature if name in constants},
            attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
        )
        made = triton.compile(
            source,
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": warps},
        )
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            command = [tools / "cuobjdump", "--dump-resource-usage", file.name]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = dict(part.split(":") for part in report.split("\\n")[-2].split() if ":" in part)
        print(kernel.__name__, logits, usage["REG"], usage["STACK"], usage["LOCAL"])
"""


def test_kernels_compile_for_a_gpu() -> None:
    """For Hopper, without one; nothing is spilled to local memory."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 6
    for name, logits, registers, stack, local in lines:
        assert (stack, local) == ("0", "0"), f"{name} of {logits} spills"
        assert int(registers) <= 128, f"{name} of {logits} takes {registers} registers"


def test_no_other_module_imports_triton() -> None:
    """CPU builds of torch come without it."""
    program = (
        "import sys, engine.sampling.triton_backend, engine.worker.tp_worker\n"
        "print('triton' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True
    )
    assert output.stdout.strip() == "False"
