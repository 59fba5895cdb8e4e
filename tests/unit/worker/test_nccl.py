"""What is asked of NCCL and CUDA, with both played by recorders: there is no GPU in CI."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.device import distributed
from engine.device.distributed import ParallelState, init_parallel
from engine.errors import ConfigError
from engine.executor import multiprocess
from engine.worker import worker_role
from engine.worker.auto_config import make_worker_config


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of init_process_group and new_group; a group is its list of ranks."""
    calls: list[Any] = []
    monkeypatch.setattr(
        distributed.dist, "init_process_group", lambda *a, **k: calls.append((a, k))
    )

    def new_group(ranks: list[int], timeout: object) -> Any:
        calls.append(ranks)
        return tuple(ranks)

    monkeypatch.setattr(distributed.dist, "new_group", new_group)
    monkeypatch.setattr(distributed.dist, "group", SimpleNamespace(WORLD="world"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "a stream")
    return calls


def join(backend: str, rank: int, tp_size: int, pp_size: int) -> ParallelState:
    return init_parallel(backend, "", rank, tp_size, pp_size, 30.0)


def test_nccl_ranks_make_the_same_groups_in_the_same_order(calls: list[Any]) -> None:
    states, made = [], []
    for rank in range(6):
        calls.clear()
        states.append(join("nccl", rank, 2, 3))
        (args, options), *groups = calls
        assert args == ("nccl",) and options["device_id"] == torch.device("cuda", 0)
        assert options["timeout"].total_seconds() == 30.0
        made.append(groups)
    assert made == [[[0, 1], [2, 3], [4, 5], [0, 1, 2, 3], [2, 3, 4, 5]]] * 6
    assert [s.tp_group for s in states] == [(0, 1)] * 2 + [(2, 3)] * 2 + [(4, 5)] * 2
    first, second = (0, 1, 2, 3), (2, 3, 4, 5)
    assert [s.send_group for s in states[:4]] == [first] * 2 + [second] * 2
    assert [s.recv_group for s in states[2:]] == [first] * 2 + [second] * 2
    assert [s.recv_stream is not None for s in states] == [False] * 2 + [True] * 4


def test_one_stage_needs_no_group_but_the_world(calls: list[Any]) -> None:
    for backend in ("nccl", "gloo"):
        calls.clear()
        state = join(backend, 1, 4, 1)
        assert len(calls) == 1 and state.tp_group == state.world_group == "world"
    calls.clear()
    state = join("gloo", 1, 2, 2)
    assert calls[0][1]["device_id"] is None and len(calls) == 3
    assert state.recv_group == state.send_group == "world" and state.recv_stream is None


def test_hidden_states_arrive_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receive isn't ordered behind the compute stream, the compute is behind the receive,
    and the memory isn't reused before it is read."""
    log: list[str] = []

    @contextmanager
    def on(stream: str) -> Any:
        log.append(f"on {stream}")
        yield
        log.append(f"off {stream}")

    class Hidden:
        def record_stream(self, stream: Any) -> None:
            log.append(f"recorded by {stream.name}")

    def irecv(tensor: Hidden, source: int, group: str) -> Any:
        log.append(f"receive from {source} in {group}")
        return SimpleNamespace(wait=lambda: log.append("ordered"))

    compute = SimpleNamespace(name="compute", wait_stream=lambda s: log.append(f"wait for {s}"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: Hidden())
    monkeypatch.setattr(distributed.dist, "irecv", irecv)
    state = ParallelState(
        1,
        2,
        1,
        2,
        recv_group="boundary",
        recv_stream="arrivals",  # type: ignore[arg-type]
    )
    hidden = state.recv_hidden(7, 32, torch.bfloat16, torch.device("cuda"))
    assert isinstance(hidden, Hidden)
    assert log == [
        "on arrivals",
        "receive from 1 in boundary",
        "ordered",
        "off arrivals",
        "wait for arrivals",
        "recorded by compute",
    ]


def test_sent_tensors_live_until_the_transfer_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: set[int] = set()
    sent: list[Any] = []

    def isend(tensor: torch.Tensor, target: int, group: str) -> Any:
        assert (target, group) == (3, "boundary")
        number = len(sent)
        sent.append(tensor)
        return SimpleNamespace(is_completed=lambda: number in done, wait=lambda: None)

    monkeypatch.setattr(distributed.dist, "isend", isend)
    state = ParallelState(1, 2, 0, 2, send_group="boundary")  # type: ignore[arg-type]
    for _ in range(3):
        state.send_hidden(torch.zeros(2, 4))
    assert len(state.pending_sends) == 3
    done |= {0, 1}
    state.send_hidden(torch.zeros(2, 4))
    assert [tensor is sent[i] for (_, tensor), i in zip(state.pending_sends, (2, 3), strict=True)]
    assert len(state.pending_sends) == 2


def test_worker_takes_its_device_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: order.append(f"device {index}"))
    monkeypatch.setattr(
        distributed, "init_parallel", lambda *args: order.append(args[0]) or ParallelState.single()
    )
    engine = SimpleNamespace(tp_size=1, pp_size=1, ep_size=None, world_size=1)
    config = SimpleNamespace(device="cuda", comm_backend="nccl", engine=engine)
    worker_role._join(config, 0, ("", 0), "127.0.0.1")  # type: ignore[arg-type]
    assert order == ["device 0", "nccl"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_leaves_its_groups(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """At its end it waits for what the groups do, after a failure it leaves them as they are."""
    calls: list[str] = []

    class Groups(SimpleNamespace):
        is_last_stage, tp_rank = True, 0

        def destroy(self) -> None:
            calls.append("destroy")

        def abandon(self) -> None:
            calls.append("abandon")

    def load(*args: object) -> SimpleNamespace:
        if fails:
            raise RuntimeError("no memory")
        return SimpleNamespace(
            num_kv_tokens=48,
            device_progress=lambda: None,
            drop_graphs=lambda: calls.append("drop graphs"),
        )

    sent: list[Any] = []
    pipe = SimpleNamespace(address="here", send=sent.append, close=lambda: None)
    monkeypatch.setattr(worker_role, "Inbox", lambda host: pipe)
    monkeypatch.setattr(worker_role, "Outbox", lambda address: pipe)
    monkeypatch.setattr(worker_role, "_join", lambda *args: Groups())
    monkeypatch.setattr(worker_role, "_load", load)
    monkeypatch.setattr(worker_role, "_turn", lambda *args: False)
    monkeypatch.setattr(worker_role, "gc", SimpleNamespace(collect=int, freeze=int))
    config = SimpleNamespace(engine=SimpleNamespace(enable_expert_metrics=False))
    with pytest.raises(RuntimeError, match="no memory") if fails else nullcontext():
        worker_role.run_worker(config, 0, ("", 0), "there", "here")  # type: ignore[arg-type]
    # Graphs hold communicators: NCCL would wait for them.
    assert calls == (["abandon"] if fails else ["drop graphs", "destroy"])
    [ready] = sent
    assert ready.address == "here"
    assert (ready.error, ready.num_kv_tokens) == (
        ("RuntimeError: no memory", 0) if fails else ("", 48)
    )


def test_processes_get_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [multiprocess._visible_device(rank) for rank in (0, 3)] == ["0", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-abc")
    assert [multiprocess._visible_device(rank) for rank in (0, 1)] == ["4", "GPU-abc"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("engine.worker.auto_config.detect_device", lambda: "cuda")
    resolved = EngineConfig(device="cuda", tp_size=2, pp_size=2, max_total_tokens=256).resolve()
    config = make_worker_config(resolved)
    assert config.comm_backend == "nccl"
    with pytest.raises(ConfigError, match=r"= 4 workers need a GPU each, but torch sees 2"):
        multiprocess.MultiprocessExecutor(config)
