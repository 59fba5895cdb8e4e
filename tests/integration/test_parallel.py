"""Tensor and pipeline parallel workers in processes of their own, over gloo.

Starting processes is what takes the time, so four of them play all scenes one after the other and
the tests look at what they report.
"""

from __future__ import annotations

import os
import queue
import socket
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.multiprocessing as mp

from engine.device.distributed import ParallelState, init_parallel, interface_of, let_gloo_use
from engine.errors import ConfigError
from tests.support.models import make_model
from tests.support.step_driver import StepDriver, make_runner

PROMPTS = ([5, 9, 100, 17, 60, 3], [7] * 11, [201, 4])
NUM_DECODE = 5


def drive(driver: StepDriver, greedy: torch.Tensor | None) -> list[torch.Tensor]:
    """Prefill in two steps, then decode as two micro-batches whose steps interleave.

    A worker without logits follows the tokens in `greedy` [steps, rows]; all must, so that
    every rank builds the same batches.
    """
    outputs: list[torch.Tensor] = []
    reqs = [driver.add(list(tokens)) for tokens in PROMPTS]

    def step(extends: list[Any], decodes: list[Any], micro_batch: int) -> None:
        logits, rows = driver.run(
            extends, decodes, prompt_logits=bool(extends), micro_batch=micro_batch
        )
        if logits is not None:
            outputs.append(torch.cat([logits, *rows]))
        for index, req in enumerate([req for req, _ in extends] + decodes):
            if req.done == len(req.tokens):
                if greedy is None:
                    assert logits is not None
                    req.tokens.append(int(logits[index].argmax()))
                else:
                    req.tokens.append(int(greedy[reqs.index(req), len(req.tokens)]))

    step([(reqs[0], 4), (reqs[1], 11)], [], 0)
    step([(reqs[0], 2), (reqs[2], 2)], [reqs[1]], 0)
    for _ in range(NUM_DECODE):
        step([], reqs[:2], 0)
        step([], reqs[2:], 1)
    if greedy is None:
        length = max(len(req.tokens) for req in reqs)
        rows = [req.tokens + [0] * (length - len(req.tokens)) for req in reqs]
        outputs.append(torch.tensor(rows))
    return outputs


SPLITS = {"tp2": (2, 1), "pp2": (1, 2), "tp2-pp2": (2, 2), "tp4": (4, 1)}
# Scenes of ranks 0 and 1 run beside those of ranks 2 and 3.
SENDS = 16
# Far above the test's own time limit: nothing here may end because of it.
TIMEOUT_S = 600.0


def play_split(name: str, first_rank: int, rank: int, stage: Stage) -> None:
    tp_size, pp_size = SPLITS[name]
    parallel = stage.join(name, rank - first_rank, tp_size, pp_size)
    driver = StepDriver(make_runner(stage.folder, page_size=4, parallel=parallel))
    outputs = drive(driver, stage.greedy)
    if parallel.is_last_stage:
        stage.queue.put((name, (parallel.tp_rank, [output.numpy() for output in outputs])))
    torch.distributed.barrier()
    parallel.destroy()


def play_sends(rank: int, stage: Stage) -> None:
    """The second stage is busy until the first one has sent everything."""
    parallel = stage.join("sends", rank, 1, 2)
    shape = (64, 256)
    if parallel.is_first_stage:
        for i in range(SENDS):
            parallel.send_hidden(torch.full(shape, float(i)))
        stage.all_sent.set()
    else:
        sent = stage.all_sent.wait(timeout=60)
        cpu = torch.device("cpu")
        received = [parallel.recv_hidden(*shape, torch.float32, cpu) for _ in range(SENDS)]
        stage.queue.put(("sends", (sent, [float(tensor.mean()) for tensor in received])))
    torch.distributed.barrier()
    parallel.destroy()


def play_death(rank: int, stage: Stage) -> None:
    """Rank 3 dies; rank 2 must not wait for the timeout. It leaves no thread of gloo's behind: one
    that still held a tensor would abort the process at its end."""
    num_threads = len(os.listdir("/proc/self/task"))
    parallel = stage.join("death", rank - 2, 2, 1)
    parallel.all_reduce(torch.ones(4))
    if rank == 3:
        os._exit(0)
    try:
        for _ in range(100):
            parallel.all_reduce(torch.ones(4))
    except RuntimeError as error:
        message = str(error)
    joined = len(os.listdir("/proc/self/task"))
    parallel.abandon()
    left = len(os.listdir("/proc/self/task"))
    stage.queue.put(("death", (message, joined - num_threads, left - num_threads)))


@dataclass
class Stage:
    """What all players share."""

    ports: dict[str, int]
    folder: str
    greedy: torch.Tensor
    all_sent: Any
    queue: Any

    def join(self, scene: str, rank: int, tp_size: int, pp_size: int) -> ParallelState:
        address = f"tcp://127.0.0.1:{self.ports[scene]}"
        return init_parallel("gloo", address, rank, tp_size, pp_size, TIMEOUT_S)


def player(rank: int, stage: Stage) -> None:
    torch.set_num_threads(1)
    if rank < 2:
        play_split("tp2", 0, rank, stage)
        play_sends(rank, stage)
    else:
        play_split("pp2", 2, rank, stage)
    play_split("tp2-pp2", 0, rank, stage)
    play_split("tp4", 0, rank, stage)
    if rank >= 2:
        play_death(rank, stage)


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Played(NamedTuple):
    wanted: list[torch.Tensor]
    """What one worker computes."""
    reports: dict[str, list[Any]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    # Four query heads over two key/value heads; no rank count divides the vocabulary of 211.
    folder = make_model(
        tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM", tie_word_embeddings=True
    )
    torch.set_num_threads(1)
    *wanted, greedy = drive(StepDriver(make_runner(str(folder), page_size=4)), None)
    context = mp.get_context("spawn")
    scenes = [*SPLITS, "sends", "death"]
    ports = dict(zip(scenes, free_ports(len(scenes)), strict=True))
    stage = Stage(ports, str(folder), greedy, context.Event(), context.Queue())
    started = mp.start_processes(player, (stage,), nprocs=4, join=False, start_method="spawn")
    reports: dict[str, list[Any]] = {scene: [] for scene in scenes}
    missing = sum(tp_size for tp_size, _ in SPLITS.values()) + 2
    while missing:
        try:
            scene, report = stage.queue.get(timeout=5)
        except queue.Empty:
            started.join(timeout=0)  # raises the error of a player that failed
            continue
        reports[scene].append(report)
        missing -= 1
    while not started.join(timeout=60):
        pass
    return Played(wanted, reports)


@pytest.mark.parametrize("name", list(SPLITS))
def test_any_split_gives_the_same_logits(played: Played, name: str) -> None:
    results = played.reports[name]
    assert sorted(rank for rank, _ in results) == list(range(SPLITS[name][0]))
    for _, outputs in results:
        assert len(outputs) == len(played.wanted)
        for actual, expected in zip(outputs, played.wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(actual), expected, atol=1e-4, rtol=1e-4)


def test_a_stage_does_not_wait_for_the_next_ones_compute(played: Played) -> None:
    [(sent_before_receiving, received)] = played.reports["sends"]
    assert sent_before_receiving, "the sends blocked until the receiver came"
    assert received == [float(i) for i in range(SENDS)]


def test_survivors_raise_when_a_rank_dies(played: Played) -> None:
    [(message, of_the_group, left)] = played.reports["death"]
    assert message
    assert of_the_group > 0 and left == 0


def test_gloo_uses_the_nodes_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's name may stand for loopback; the address that other hosts know doesn't."""
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") == ""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    let_gloo_use("203.0.113.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    let_gloo_use("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    let_gloo_use("127.0.0.1")
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "lo"


def test_single_worker_needs_no_group() -> None:
    state = init_parallel("gloo", "tcp://127.0.0.1:1", 0, 1, 1, 1.0)
    assert state == ParallelState.single()
    tensor = torch.ones(2, 3)
    assert state.all_reduce(tensor) is tensor and state.all_gather_last_dim(tensor) is tensor
    with pytest.raises(ConfigError, match="rank 4"):
        init_parallel("gloo", "tcp://127.0.0.1:1", 4, 2, 2, 1.0)
