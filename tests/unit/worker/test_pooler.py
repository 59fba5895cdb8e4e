"""Embeddings of a worker's steps: any mix of pooled rows, cut anywhere, equals whole prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.protocol.step import PooledLines
from tests.support.models import make_model
from tests.support.step_driver import DrivenReq, StepDriver, make_runner

HIDDEN = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM", head_dim=16))


@pytest.fixture(params=["torch", "cpu"])
def driver(folder: str, request: pytest.FixtureRequest) -> StepDriver:
    return StepDriver(make_runner(folder, page_size=4, attention_backend=request.param))


def ints(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


def pool(
    driver: StepDriver,
    extends: list[tuple[DrivenReq, int]],
    last: Sequence[int] = (),
    mean: Sequence[int] = (),
    ends: Sequence[int] = (),
    decodes: Sequence[DrivenReq] = (),
    sampled: Sequence[int] = (),
    prompt_rows: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [S, vocab] and embeddings [E, hidden] of one step."""
    batch = driver.build(extends, list(decodes), sampled=sampled)
    batch.pooled = PooledLines(ints(last), ints(mean), ints(ends))
    forward = driver.runner.prepare(batch)
    forward.prompt_logits_lines = list(prompt_rows)
    output = driver.runner.forward(forward)
    assert output is not None and output.embeddings is not None
    return output.logits, output.embeddings


def prompt(n: int) -> list[int]:
    rng = random.Random(n)
    return [rng.randrange(3, 211) for _ in range(n)]


def alone(driver: StepDriver, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both embeddings [hidden] of a prompt, each in one step of its own."""
    found = []
    for kind in ("last", "mean"):
        req = driver.add(tokens)
        rows = {"last": [0]} if kind == "last" else {"mean": [0], "ends": [0]}
        _, embeddings = pool(driver, [(req, len(tokens))], **rows)
        driver.remove(req)
        assert embeddings.shape == (1, HIDDEN) and embeddings.dtype == torch.float32
        found.append(embeddings[0])
    return found[0], found[1]


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_prompt_of_one_token(driver: StepDriver) -> None:
    assert near(*alone(driver, [7]))


def test_vectors_are_behind_the_final_norm(driver: StepDriver) -> None:
    req = driver.add(prompt(9))
    logits, (last,) = pool(driver, [(req, 9)], last=[0], sampled=[0])
    head = driver.runner.model.head
    assert head is not None and near(head(last[None]), logits)


def test_mixed_rows_come_in_order(driver: StepDriver) -> None:
    """Last states first, then means; decodes and sampled prompts are as without them."""
    lens = [11, 6, 20, 3, 9]
    wanted = [alone(driver, prompt(n)) for n in lens]
    decode = driver.add(prompt(13))
    driver.run([(decode, 12)], [])
    plain = driver.add(prompt(9))
    expected, _ = driver.run([(plain, 9)], [])
    assert expected is not None
    driver.remove(plain)
    reqs = [driver.add(prompt(n)) for n in lens]
    logits, embeddings = pool(
        driver,
        [(req, len(req.tokens)) for req in reqs],
        last=[0, 3],
        mean=[1, 2],
        ends=[1, 2],
        decodes=[decode],
        sampled=[4, 5],
    )
    assert near(logits[0], expected[0]) and len(logits) == 2
    rows = [wanted[0][0], wanted[3][0], wanted[1][1], wanted[2][1]]
    assert len(embeddings) == 4 and all(map(near, embeddings, rows))


def test_a_step_of_last_states_alone_has_no_logits(
    driver: StepDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(driver.runner.model), "compute_logits", None)
    req = driver.add(prompt(5))
    logits, embeddings = pool(driver, [(req, 5)], last=[0])
    assert logits.shape == (0, 211) and len(embeddings) == 1
    _, embeddings = pool(driver, [(driver.add(prompt(5)), 5)], mean=[0], ends=[0])
    assert len(embeddings) == 1


@pytest.mark.parametrize("seed", range(4))
def test_chunks_add_up(driver: StepDriver, seed: int) -> None:
    rng = random.Random(seed)
    tokens = prompt(60)
    wanted = alone(driver, tokens)
    req, other = driver.add(tokens), driver.add(tokens)
    cuts = [*sorted(rng.sample(range(1, 60), 4)), 60]
    for cut in cuts:
        short = driver.add(prompt(7))
        extends = [(req, cut - req.done), (other, cut - other.done), (short, 7)]
        is_last = cut == 60
        _, embeddings = pool(
            driver,
            extends,
            last=[1] if is_last else [],
            mean=[2, 0],
            ends=[2, 0] if is_last else [2],
        )
        driver.remove(short)
        assert len(embeddings) == (3 if is_last else 1)
    assert near(embeddings[0], wanted[0]) and near(embeddings[2], wanted[1])


def test_a_first_chunk_begins_anew(driver: StepDriver) -> None:
    """What an aborted request left is replaced, and a missing chunk is noticed."""
    gone = driver.add(prompt(30))
    pool(driver, [(gone, 16)], mean=[0])
    driver.remove(gone)
    tokens = prompt(31)
    wanted = alone(driver, tokens)[1]
    req = driver.add(tokens)
    pool(driver, [(req, 16)], mean=[0])
    _, (found,) = pool(driver, [(req, 15)], mean=[0], ends=[0])
    assert near(found, wanted)
    assert driver.runner._pooler._running is None
    other = driver.add(prompt(30))
    driver.run([(other, 8)], [], sampled=[])
    with pytest.raises(ValueError, match="first 8 tokens"):
        pool(driver, [(other, 8)], mean=[0])


def test_beside_prompt_logprobs(driver: StepDriver) -> None:
    """All tokens' outputs are there: the last states are found among them."""
    wanted = alone(driver, prompt(12))
    reqs = [driver.add(prompt(n)) for n in (12, 10, 12)]
    extends = [(req, len(req.tokens)) for req in reqs]
    _, found = pool(driver, extends, last=[2], mean=[0], ends=[0], sampled=[1], prompt_rows=[1])
    assert near(found[0], wanted[0]) and near(found[1], wanted[1])
