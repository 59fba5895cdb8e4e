"""Adapters over HTTP: two replicas of a real model, loads by hand, and what dies under streams."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.common import REPO_ROOT
from benchmarks.servers import ManagedServer
from tests.support.adapters import make_adapter
from tests.support.engines import load_reference
from tests.support.http_server import (
    disturbed_streams,
    ids_of,
    manta,
    metric,
    sampled_body,
    wait_idle,
)
from tests.support.processes import actor_pids, launch_mark

MODEL = REPO_ROOT / "models" / "manta-small"
LISTED = tuple(f"a{n}" for n in range(8))
NAMES = ("manta-small", *LISTED, "hot")
STREAMS = 32
TOKENS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters: those listed, and two to be loaded."""
    at = tmp_path_factory.mktemp("adapters")
    model = load_reference(MODEL)
    for seed, name in enumerate((*LISTED, "hot", "new")):
        make_adapter(at / name, model, rank=4 + 2 * seed, seed=seed, size=0.8)
    return at


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ManagedServer]:
    listed = {name: str(folder / name) for name in LISTED}
    with manta(
        num_replicas=2,
        dtype="float32",
        lora_adapters=listed,
        lora_load_folders=[str(folder)],
        max_loras=4,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: ManagedServer) -> str:
    return server.base_url


def load(url: str, name: str, path: Path | str, **more: Any) -> httpx.Response:
    fields = {"lora_name": name, "lora_path": str(path), **more}
    return httpx.post(f"{url}/v1/load_lora_adapter", json=fields, timeout=120)


def unload(url: str, name: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)


def names(url: str) -> list[str]:
    return [m["id"] for m in httpx.get(f"{url}/v1/models", timeout=30).json()["data"]]


def run(bodies: list[dict[str, Any]], url: str, then: Callable[[], object] = bool) -> list[Any]:
    """Token ids of streams; `then` is called while they run."""
    return ids_of(asyncio.run(disturbed_streams(url, bodies, then)))


def test_the_official_client(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    parents = {m.id: m.parent for m in client.models.list()}  # type: ignore[attr-defined]
    assert parents == {"manta-small": None, **dict.fromkeys(LISTED, "manta-small")}
    assert client.models.retrieve("a1").id == "a1"
    texts = set()
    for name in ("manta-small", "a0", "a1"):
        reply = client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": "Say it"}],
            temperature=0,
            max_tokens=9,
        )
        assert reply.model == name
        texts.add(reply.choices[0].message.content)
    assert len(texts) == 3
    with pytest.raises(openai.NotFoundError, match="`a1`"):
        client.completions.create(model="none", prompt="x")


def test_a_dying_engine_breaks_no_stream(server: ManagedServer, url: str, folder: Path) -> None:
    """Each stream ends as it would have, on the version that it began with."""
    assert load(url, "hot", folder / "hot").status_code == 200
    bodies = [sampled_body(NAMES[n % 10], n, TOKENS) for n in range(STREAMS)]
    alone = [run([one], url)[0] for one in bodies]
    assert len({tuple(ids) for ids in alone}) == STREAMS
    assert run(bodies, url) == alone

    def kill() -> None:
        os.kill(actor_pids(launch_mark(server.pid), "WorkerActor")[0], signal.SIGKILL)

    assert run(bodies, url, kill) == alone

    def replace() -> None:
        reply = load(url, "hot", folder / "new", load_inplace=True)
        assert reply.status_code == 200, reply.text

    assert run(bodies, url, replace) == alone
    again = run(bodies, url)
    assert [a == b for a, b in zip(again, alone, strict=True)] == [
        n % 10 != 9 for n in range(STREAMS)
    ]
    assert run(bodies, url, lambda: unload(url, "hot")) == again
    assert names(url) == ["manta-small", *LISTED]
    reply = httpx.post(f"{url}/v1/completions", json=bodies[9], timeout=30)
    assert reply.status_code == 404
    wait_idle(url, 30)
    # Leaks are looked for whenever an engine has nothing to do.
    assert metric(url, "manta_engine_kv_leaks_total") == 0
    assert metric(url, "manta_engine_adapter_waiting_requests") == 0


def test_what_was_loaded_outlives_the_ingress(
    server: ManagedServer, url: str, folder: Path
) -> None:
    assert load(url, "kept", folder / "hot").status_code == 200
    with ThreadPoolExecutor(50) as pool:  # fifty at once
        replies = pool.map(lambda n: load(url, f"n{n}", folder / ("hot", "new")[n % 2]), range(50))
        assert [reply.status_code for reply in replies] == [200] * 50
        replies = pool.map(lambda n: unload(url, f"n{n}"), range(50))
        assert [reply.status_code for reply in replies] == [200] * 50
    want = run([sampled_body("kept", 1, TOKENS)], url)
    (ingress,) = actor_pids(launch_mark(server.pid), "ServeReplica:llm:ingress")
    os.kill(ingress, signal.SIGKILL)
    deadline = time.monotonic() + 90
    while True:
        try:
            if names(url) == ["manta-small", *LISTED, "kept"]:
                break
        except (httpx.HTTPError, ValueError, KeyError):
            pass  # the new one is starting
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert run([sampled_body("kept", 1, TOKENS)], url) == want
    assert unload(url, "kept").status_code == 200


def test_hostile_loads(url: str, folder: Path, tmp_path: Path) -> None:
    """A 4xx with a reason for each; nothing outside the folder is read, and the server goes on."""
    shutil.copytree(folder / "hot", tmp_path / "outside")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "odd").mkdir()
    shutil.copy(folder / "hot" / "adapter_config.json", folder / "odd")
    (folder / "odd" / "adapter_model.safetensors").write_bytes(b"\xff" * 1000)
    wide = make_adapter(folder / "wide", load_reference(MODEL), rank=100)
    cases = [
        (("x", tmp_path / "outside"), "lora_load_folders"),
        (("x", f"{folder}/../outside"), "lora_load_folders"),
        (("x", "/etc"), "lora_load_folders"),
        (("x", "hot"), "lora_load_folders"),
        (("x", folder / "link"), "lora_load_folders"),
        (("x", folder / "none"), "no adapter folder"),
        (("x", folder / "odd"), "can't be read"),
        (("x", wide), "max_lora_rank"),
        (("../x", folder / "hot"), "name"),
        (("a1", folder / "hot"), "otherwise"),
        (("manta-small", folder / "hot"), "already"),
    ]
    for given, says in cases:
        reply = load(url, *given)
        assert reply.status_code == 400, reply.text
        assert says in reply.json()["error"]["message"]
    assert unload(url, "a1").status_code == 404
    assert names(url) == ["manta-small", *LISTED]
    assert run([sampled_body("a2", 5, TOKENS)], url)[0]
