"""The wheel in an environment of its own: it brings the configs and the model, and serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.common import REPO_ROOT
from benchmarks.servers import free_port
from engine.native.key import SOURCE_SUFFIXES

INSTALL_TIMEOUT_S = 900


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows, so that nothing of this folder slips in."""
    source = tmp_path_factory.mktemp("source")
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO_ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (REPO_ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((REPO_ROOT / name).read_bytes())
            target.chmod((REPO_ROOT / name).stat().st_mode)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


def build_wheel(source: Path, folder: Path) -> Path:
    pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of a clean environment with the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin/python"
    pip(python, "install", "--quiet", "-c", str(REPO_ROOT / "constraints.txt"), str(wheel))
    yield python


def pip(python: Path, *arguments: str) -> None:
    ran = subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        env=clean_environment(),
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def clean_environment() -> dict[str, str]:
    """Ours without what leads to this checkout: pip takes a package found there for installed."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def test_wheel_holds_all_that_a_server_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        wrapper = packed.getinfo("deploy/start/haproxy-wrapper")
    for folder in ("configs", "models/manta-small"):
        for file in (REPO_ROOT / folder).iterdir():
            assert f"manta_files/{folder}/{file.name}" in names
    for folder in ("engine", "deploy", "benchmarks/load"):
        for source in (REPO_ROOT / folder).rglob("*.py"):
            assert str(source.relative_to(REPO_ROOT)) in names
    for source in (REPO_ROOT / "engine/csrc").iterdir():
        assert source.suffix not in SOURCE_SUFFIXES or f"engine/csrc/{source.name}" in names
    assert not any(name.endswith(".so") for name in names)
    assert wheel.stem.endswith("-py3-none-any"), "it fits every platform"
    assert wrapper.external_attr >> 16 & 0o111, "the wrapper must be executable"
    assert all(n.startswith("benchmarks/load/") for n in names if n.startswith("benchmarks/"))
    tops = {name.split("/")[0] for name in names}
    assert tops - {"engine", "deploy", "benchmarks", "manta_files", "serve_app.py"} == {
        next(top for top in tops if top.endswith(".dist-info"))
    }


def test_a_wheel_with_a_library_of_kernels_is_for_one_platform(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    """`wheel` is only named so that the source is built without the library first."""
    library = source / "engine/native/lib/manta_cpu_kernels-some.so"
    library.parent.mkdir()
    library.write_text("a library")
    shipping = build_wheel(source, tmp_path / "with")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-linux_" in shipping.stem
    with zipfile.ZipFile(shipping) as packed:
        names = set(packed.namelist())
    assert "engine/native/lib/manta_cpu_kernels-some.so" in names
    assert {"engine/native/library.py", "manta_files/configs/llama.yaml"} <= names
    library.unlink()
    again = build_wheel(source, tmp_path / "without")
    assert again.name == wheel.name
    with zipfile.ZipFile(again) as packed:
        assert not any(name.endswith(".so") for name in packed.namelist())


@pytest.mark.timeout(1200)
def test_installed_wheel_serves_from_anywhere(python: Path, tmp_path: Path) -> None:
    """`manta serve` without arguments, and the small model by `engine.LLM`."""
    manta = python.with_name("manta")
    env = clean_environment()
    env["MANTA_LOG_DIR"] = str(tmp_path / "logs")
    here: dict[str, Any] = {"cwd": tmp_path, "env": env, "text": True}
    checked = subprocess.run([manta, "check"], capture_output=True, **here)
    assert checked.returncode == 0 and "manta_files" in checked.stdout, checked
    port = free_port()
    server = subprocess.Popen(
        [manta, "serve", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **here,
    )
    lines: list[str] = []
    assert server.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(server.stdout or []))
    reader.start()
    try:
        deadline = time.monotonic() + 180
        while not any(line.startswith("try: ") for line in lines):
            assert server.poll() is None and time.monotonic() < deadline, lines
            time.sleep(0.2)
        url = f"http://127.0.0.1:{port}"
        body = {"model": "manta-small", "prompt": "Return the", "max_tokens": 4}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200 and reply.json()["choices"][0]["text"]
        load = "--num-prompts 8 --concurrency 4 --input-len 16 --output-len 8 --warmup 1"
        bench = subprocess.run(
            [manta, "bench", "--base-url", url, *load.split()], capture_output=True, **here
        )
        assert bench.returncode == 0, bench
        figures = json.loads(bench.stdout.splitlines()[-1])
        assert figures["ok"] and figures["environment"]["commit"] is None
        chat = subprocess.run(
            [manta, "chat", "--url", url, "--max-tokens", "4"],
            input="What does os.path.join do?\n",
            capture_output=True,
            **here,
        )
        assert chat.returncode == 0 and chat.stdout.strip(), chat
    finally:
        server.send_signal(2)
        assert server.wait(120) == 0
        reader.join()
    code = (
        "from engine import LLM, SamplingParams\n"
        "with LLM('models/manta-small', max_total_tokens=4096) as llm:\n"
        "    print(llm.generate(['def '], SamplingParams(max_tokens=4))[0].outputs[0].text)\n"
    )
    ran = subprocess.run([python, "-c", code], capture_output=True, **here)
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr[-2000:]
