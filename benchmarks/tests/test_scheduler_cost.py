"""The scheduler benchmark: what it measures of Manta, its verdict, a peer that doesn't run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.decode_load import CacheThrash, DecodeLoad, Measured
from benchmarks.peers.vllm_cpu import PeerSetupError
from benchmarks.peers.vllm_scheduler_process import VllmScheduler
from benchmarks.scheduler_cost import Cell, Contender, Results, compare, measure_manta


def load(page_size: int = 16, tokens: tuple[int, int] = (100, 4096)) -> DecodeLoad:
    return DecodeLoad(20, page_size, False, tokens, warmup=3, steps=5)


@pytest.mark.parametrize("page_size", [1, 16])
def test_measures_every_step_of_every_request(page_size: int) -> None:
    measured = measure_manta(load(page_size), CacheThrash())
    assert measured.sound
    assert len(measured.launch_us) == len(measured.result_us) == 5
    assert min(measured.launch_us + measured.result_us) > 0
    prompt = sum(load().prompt_lens) / 20
    assert measured.context_len == [prompt + 3, prompt + 8]


def test_a_request_that_ends_is_not_sound() -> None:
    eos = 1
    assert not measure_manta(load(tokens=(eos, 9)), CacheThrash()).sound


def test_prompts_differ_and_spread_over_a_page() -> None:
    prompts = load().prompts()
    assert len({prompt[:16].tobytes() for prompt in prompts}) == 20
    assert {len(prompt) % 16 for prompt in prompts} == set(range(16))


def results(*cells: tuple[str, int, float], context_len: float = 300.0) -> Results:
    return {
        Cell(256, False, Contender(engine, False, page_size)): [
            Measured([us / 2], [us / 2], [context_len, 300.0])
        ]
        for engine, page_size, us in cells
    }


@pytest.mark.parametrize(("manta_us", "enough"), [(20.0, True), (20.1, False)])
def test_the_verdict_is_against_the_cheapest(manta_us: float, enough: bool) -> None:
    (row,) = compare(results(("manta", 1, manta_us), ("vllm", 1, 400.0), ("vllm", 16, 100.0)))
    assert row["cheapest vllm"] == "vllm plain p16"
    assert row["ratio"] == pytest.approx(100.0 / manta_us)
    assert row["enough"] is enough and row["sound"] is True


def test_other_lengths_are_no_comparison() -> None:
    ours = results(("manta", 1, 1.0), context_len=303.0)
    (row,) = compare({**ours, **results(("vllm", 16, 100.0))})
    assert row["sound"] is False and row["enough"] is True


def test_a_peer_that_does_not_start_says_why(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho no such engine >&2\nexit 3\n")
    python.chmod(0o755)
    with (
        VllmScheduler(python, tmp_path) as vllm,
        pytest.raises(PeerSetupError, match="no such engine"),
    ):
        vllm.measure(load(), asynchronous=False)
