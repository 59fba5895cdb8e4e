"""Where a launch runs: odd paths, few open files, a proxy in the environment; Ray that ends."""

from __future__ import annotations

import io
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.start import folder as folders
from deploy.start.chat import Chat
from deploy.start.cluster_token import TOKEN_PATH, token_file
from deploy.start.folder import is_plain, launch_folder, plain_python
from deploy.start.processes import MARK
from deploy.start.ray_processes import RayProcesses
from tests.support.fake_client import FakeEngineClient
from tests.support.http_application import Server


@pytest.mark.parametrize("name", ["a b", "é", "a'b", "a;b", "a$b", "x" * 30])
def test_a_folder_that_ray_cannot_name_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    parent = Path("/tmp") / f"{os.getpid() % 1000}{name}"
    parent.mkdir()
    try:
        monkeypatch.setenv("RAY_TMPDIR", str(parent))
        with launch_folder() as made:
            assert made.path.parent == Path("/tmp")
            assert is_plain(str(made.path))
    finally:
        shutil.rmtree(parent)


def test_an_environment_with_a_blank_in_its_path_gets_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / "my env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    monkeypatch.setattr(folders.sys, "prefix", str(environment))
    monkeypatch.setattr(folders.sys, "executable", str(environment / "bin" / "python"))
    python = plain_python(tmp_path)
    assert is_plain(python)
    prefix = subprocess.run(
        [python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
    )
    assert Path(prefix.stdout.strip()).resolve() == environment
    assert is_plain(prefix.stdout.strip())


def test_an_ordinary_environment_needs_no_link(tmp_path: Path) -> None:
    assert plain_python(tmp_path) == sys.executable
    assert not list(tmp_path.iterdir())


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", TOKEN_PATH):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_token")
def test_a_home_that_cannot_be_written_holds_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.touch()  # root may write in every folder
    monkeypatch.setenv("HOME", str(home))
    made = token_file(tmp_path)
    assert made is not None and made.parent == tmp_path
    assert len(made.read_text()) >= 32 and made.stat().st_mode & 0o77 == 0


@pytest.mark.usefixtures("no_token")
def test_a_user_without_a_home_has_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert token_file(tmp_path) is not None


@pytest.mark.usefixtures("no_token")
@pytest.mark.parametrize("given", [None, "RAY_AUTH_TOKEN", TOKEN_PATH])
def test_where_ray_has_a_token_or_a_place_for_it_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    if given is not None:
        home.rmdir()
        home.touch()
        monkeypatch.setenv(given, "x")
    assert token_file(tmp_path) is None


_RAISE = """
import resource
from deploy.start.open_files import raise_open_files
print(raise_open_files())
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def with_open_files(soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _RAISE],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )


@pytest.mark.parametrize("hard", [128, 400])
def test_too_few_open_files_are_refused_with_the_number_needed(hard: int) -> None:
    done = with_open_files(hard, hard)
    assert done.returncode == 1
    assert f"ConfigError: a process may have {hard} open files here" in done.stderr
    assert "needs 1024" in done.stderr


def test_the_soft_limit_is_raised_and_few_connections_are_told() -> None:
    told, soft = with_open_files(256, 1100).stdout.splitlines()
    assert soft == "1100"
    assert "only 235 connections at once" in told
    assert with_open_files(256, 4096).stdout.splitlines() == ["[]", "4096"]


def test_chat_does_not_ask_a_proxy_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(FakeEngineClient())
    server.start()
    try:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        assert Chat(f"http://127.0.0.1:{server.port}", None, None, None).run() == 0
        assert Chat("http://manta.invalid", None, None, None).run() == 1
        assert "refused" in capsys.readouterr().err, "another machine is reached by the proxy"
    finally:
        server.stop()


def test_a_process_of_rays_that_ends_is_named(tmp_path: Path) -> None:
    program = tmp_path / "raylet"
    shutil.copy(shutil.which("sleep") or "", program)
    raylet = subprocess.Popen([program, "60"], env={**os.environ, MARK: "of-this-test"})
    try:
        processes = RayProcesses("of-this-test")
        processes.find()
        assert processes.lost() == ""
    finally:
        raylet.kill()
    raylet.wait()
    assert f"Ray's raylet, process {raylet.pid}, has ended" in processes.lost()
