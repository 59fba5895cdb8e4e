"""What `manta serve` checks, chooses and prints, without starting anything."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import yaml

from deploy.serve_state import serve_log
from deploy.start import child, cli, log_file, ports, preflight
from deploy.start.causes import cause_of, config_error_in, port_taken
from deploy.start.folder import launch_folder
from deploy.start.log_file import LaunchLog
from deploy.start.ports import PortBlock, hold_api_port
from deploy.start.target import load_target
from engine.errors import ConfigError, EngineDeadError, EngineDrainingError
from engine.process.log_lines import JsonFormatter
from engine.process.shipped import shipped_root
from tests.support.http_application import wait_until

ROOT = Path(__file__).resolve().parents[4]
SMALL = str(ROOT / "models/manta-small")
DEAD = 2**22 + 1
"""No process has such an id."""


@pytest.fixture
def free_port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield port


# --- what to serve


def test_a_model_folder_is_served_as_the_default_config_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From wherever; but the size of its KV cache and its name are the model's own."""
    shutil.copytree(SMALL, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    target = load_target("mine", [], port=1234)
    (app,) = target.applications
    assert app.model_name == "mine"
    assert app.engine.max_total_tokens is None
    assert app.engine.model == str(tmp_path / "mine")
    assert target.http["port"] == 1234
    assert target.config["applications"][0]["import_path"] == "serve_app:build_app"


def test_a_config_file_may_lie_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its model is looked for beside the caller, then among what Manta brings."""
    config = yaml.safe_load((ROOT / "configs/llama.yaml").read_text())
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    (app,) = load_target("my.yaml", []).applications
    assert app.engine.model == SMALL
    shutil.copytree(SMALL, tmp_path / "models/manta-small")
    (app,) = load_target("my.yaml", []).applications
    assert app.engine.model == str(tmp_path / "models/manta-small")


def test_shipped_configs_are_found_from_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (app,) = load_target("configs/llama-tp2.yaml", []).applications
    assert app.engine.tp_size == 2


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nowhere.yaml", "does not exist; there are .*llama.yaml"),
        ("nowhere", "neither a config file, nor a model folder"),
        ("a b/c", "neither a config file"),
        ("/etc", "config.json"),
    ],
)
def test_what_cannot_be_served_is_named(target: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_target(target, [])


def test_broken_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("applications: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_target(str(path), [])
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_target(str(path), [])
    path.write_text("http_options:\n  port: 1\napplications: []\nhttp_options:\n  port: 2\n")
    with pytest.raises(ConfigError, match="'http_options' stands twice"):
        load_target(str(path), [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("applications: [x]", "must be a mapping with name"),
        ("applications: [{args: text}]", "`args` must be a mapping"),
        ("http_options: 8000\napplications: [{}]", "`http_options` must be a mapping"),
        ("http_options: {port: abc}\napplications: [{}]", "port must be a number"),
        ("applications: [{1: 2}]", "unknown application key '1'"),
    ],
)
def test_a_config_of_another_shape_is_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_target(str(path), [])


def test_empty_parts_of_a_config_are_defaults(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("http_options:\napplications: [{import_path: 'serve_app:build_app', args: }]")
    target = load_target(str(path), [])
    assert (target.http["host"], target.http["port"]) == ("127.0.0.1", 8000)


def test_what_cannot_be_read_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="not valid YAML; quote it"):
        load_target(SMALL, ["served_model_name=@x"])
    with pytest.raises(ConfigError, match="can't be looked up"):
        load_target("x" * 300, [])


def test_a_link_keeps_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "nice-name").symlink_to(SMALL)
    (app,) = load_target(str(tmp_path / "nice-name"), []).applications
    assert app.model_name == "nice-name"


def test_shipped_files_of_a_wheel_win_over_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from engine.process import shipped

    assert shipped_root() == ROOT
    (tmp_path / "engine").mkdir()
    (tmp_path / "manta_files").mkdir()
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "engine/process/shipped.py"))
    assert shipped_root() == tmp_path / "manta_files"


# --- this machine


def test_weights_that_are_missing_or_cut_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SMALL, folder)
    preflight.check_weights(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(ConfigError, match=r"model\.safetensors can't be read"):
        preflight.check_weights(folder)
    weights.unlink()
    with pytest.raises(ConfigError, match="holds no"):
        preflight.check_weights(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SMALL, folder)
    index = folder / "model.safetensors.index.json"
    (folder / "model.safetensors").rename(folder / "1.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"lacks 2\.safetensors"):
        preflight.check_weights(folder)
    index.write_text("{}")
    with pytest.raises(ConfigError, match="can't be read"):
        preflight.check_weights(folder)


# --- ports


def test_a_taken_port_names_who_has_it(free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        with pytest.raises(ConfigError, match=rf"port {free_port}: Address already in use") as told:
            hold_api_port("127.0.0.1", free_port)
        assert "--port" in str(told.value) and "(process " in str(told.value)
    hold_api_port("127.0.0.1", free_port).close()


def test_two_launches_do_not_share_an_api_port(free_port: int) -> None:
    """Serve's Python proxies would, silently."""
    with (
        hold_api_port("127.0.0.1", free_port),
        pytest.raises(ConfigError, match="starting or stopping"),
    ):
        hold_api_port("127.0.0.1", free_port)
    hold_api_port("127.0.0.1", free_port).close()


@pytest.mark.parametrize("port", [0, -1, 70_000])
def test_a_port_that_does_not_exist_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="there is no port"):
        hold_api_port("127.0.0.1", port)


def test_an_unknown_host_is_refused(free_port: int) -> None:
    with pytest.raises(ConfigError):
        hold_api_port("203.0.113.7", free_port)


def test_blocks_lie_below_the_ephemeral_ports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = tmp_path / "range"
    monkeypatch.setattr(ports, "_EPHEMERAL", limits)
    limits.write_text("16384\t60999\n")
    assert ports.blocks() == [12_000, 13_000, 14_000, 15_000]
    limits.write_text("1024\t60999\n")
    assert ports.blocks()[0] == 12_000 and len(ports.blocks()) == 20
    limits.unlink()
    assert len(ports.blocks()) == 20


def test_a_block_is_held_and_taken_ones_are_skipped() -> None:
    with ExitStack() as stack:
        mine = stack.enter_context(PortBlock())
        other = stack.enter_context(PortBlock())
        assert other.first > mine.first
        for port in (mine.first, mine.fallback_http, mine.fallback_grpc):
            with socket.socket() as probe, pytest.raises(OSError):
                probe.bind(("127.0.0.1", port))
        # Serve's fallback proxy asks to share its port, as the same user: it gets it.
        with socket.socket() as proxy:
            proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            proxy.bind(("127.0.0.1", mine.fallback_http))
            proxy.listen()
        assert not set(mine.replicas) & set(other.replicas)
        assert mine.replicas.start > mine.fallback_grpc
    with PortBlock() as again:
        assert again.first == mine.first


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_a_block_with_one_taken_port_is_skipped(offset: int) -> None:
    with PortBlock() as block:
        first = block.first
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        foreign.bind(("127.0.0.1", first + offset))
        foreign.listen()
        with PortBlock() as block:
            assert block.first > first


def test_no_free_block_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "blocks", lambda: [])
    with pytest.raises(ConfigError, match="no block of 1000 ports"):
        PortBlock()


# --- why a start failed

DEEP = """The deployment failed to start 3 times in a row. See controller logs for details. Error:
\x1b[36mray::ServeReplica:llm:engine.initialize()\x1b[39m (pid=1, ip=192.0.2.2)
  File "x.py", line 1, in start
engine.errors.EngineDeadError: the engine can't start: worker 0 ended: RayTaskError(ConfigError): \
engine.errors.ConfigError: /m holds no *.safetensors file.
"""


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (DEEP, "/m holds no *.safetensors file."),
        ("engine.errors.ConfigError: page_size: too large", "page_size: too large"),
        (
            "engine.errors.EngineDeadError: the engine can't start: scheduler ended: "
            "RayTaskError(EngineDeadError): engine.errors.EngineDeadError: worker 0 can't start: "
            "ConfigError: /m/a.safetensors can't be read: header: too short",
            "/m/a.safetensors can't be read: header: too short",
        ),
        ("Traceback\n  ...\nKeyError: 'a'\n\nRuntimeError: no luck: at all", None),
        ("a\nray.exceptions.RaySystemError: System error: x", "RaySystemError: System error: x"),
        ("it just ended", ""),
        ("", ""),
    ],
)
def test_the_cause_is_one_sentence(message: str, cause: str | None) -> None:
    assert cause_of(message) == ("RuntimeError: no luck: at all" if cause is None else cause)


def test_a_config_error_in_the_log_ends_the_start() -> None:
    line = "\x1b[36m(ServeController pid=9)\x1b[0m engine.errors.ConfigError: set tp_size to 1.\n"
    assert config_error_in(line) == "set tp_size to 1."
    assert config_error_in("(x pid=9) INFO nothing") == ""
    assert config_error_in("  raise ConfigError(") == ""


def test_haproxys_complaint_names_the_port(tmp_path: Path) -> None:
    folder = tmp_path / "f00"
    folder.mkdir()
    log = folder / "admin.sock.12.1.stderr.log"
    log.write_text("[NOTICE] fine\n")
    assert port_taken(tmp_path) == ""
    log.write_text(
        "[ALERT]    (28) : Starting frontend http_frontend: cannot bind socket (Address already in "
        "use) [127.0.0.1:8000]\n"
    )
    assert port_taken(tmp_path).startswith("HAProxy can't listen on 127.0.0.1:8000: Address")


# --- the log


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MANTA_LOG_DIR", str(tmp_path / "logs"))
    return tmp_path / "logs"


def test_log_rotates_and_loses_colours(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MAX_BYTES", 1000)
    log = LaunchLog(8000)
    log.write("\x1b[36mfirst\x1b[0m line %s\n")
    assert log.path.read_text() == "first line %s\n"
    assert log.path.stat().st_mode & 0o077 == 0
    for i in range(2000):
        log.write(f"line {i}\n")
    log.close()
    files = sorted(logs.iterdir())
    assert len(files) == 1 + log_file.BACKUPS
    assert log.path.read_text().endswith("line 1999\n")
    assert sum(file.stat().st_size for file in files) < 5000
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_old_launches_are_forgotten(logs: Path) -> None:
    logs.mkdir()
    for i in range(30):
        (logs / f"manta-20200101-0000{i:02}-port1-{DEAD}.log").write_text("x")
        (logs / f"manta-20200101-0000{i:02}-port1-{DEAD}.log.1").write_text("x")
    foreign = {"mine.txt", "manta-other.log"}
    lives = f"manta-20190101-000000-port1-{os.getpid()}.log"
    for name in {*foreign, lives}:
        (logs / name).write_text("keep")
    log = LaunchLog(1)
    log.close()
    kept = {file.name for file in logs.iterdir()}
    assert kept >= {*foreign, lives, log.path.name}, "what others wrote, and who still runs"
    ours = [name for name in kept - foreign - {lives} if name.endswith(".log")]
    assert len(ours) == log_file.LAUNCHES_KEPT
    assert f"manta-20200101-000029-port1-{DEAD}.log.1" in kept
    assert f"manta-20200101-000010-port1-{DEAD}.log.1" not in kept


def test_log_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANTA_LOG_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert log_file.log_folder() == Path("/state/manta/logs")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert log_file.log_folder() == Path.home() / ".local/state/manta/logs"


def test_warnings_of_ours_reach_the_terminal_and_rays_do_not() -> None:
    ours = "\x1b[36m(WorkerActor pid=3)\x1b[0m WARNING engine.worker.tp_worker: few graphs"
    match = child.OUR_WARNING.search(ours)
    assert match is not None and match[2] == "engine.worker.tp_worker: few graphs"
    for noise in (
        "(WorkerActor pid=3) INFO engine.models: weights loaded",
        "(ServeController pid=3) WARNING 2026-11-22 15:00:00,000 controller 3 -- HTTPOptions.host",
    ):
        assert child.OUR_WARNING.search(noise) is None


@pytest.mark.parametrize("end", ["", " [repeated 3x across cluster]"])
def test_json_lines_are_read_as_text(end: str) -> None:
    try:
        raise ConfigError('set "page_size" to 16')
    except ConfigError:
        info = sys.exc_info()
    made = logging.LogRecord("engine.x", logging.WARNING, "", 0, "few %s\nor none", ("{}",), info)
    line = f"\x1b[36m(WorkerActor pid=3)\x1b[0m {JsonFormatter().format(made)}{end}\n"
    texts = child.json_in(line)
    assert texts[:2] == ["WARNING engine.x: few {}\n", "or none\n"]
    match = child.OUR_WARNING.search(texts[0])
    assert match is not None and match[2] == "engine.x: few {}"
    assert [found for text in texts if (found := config_error_in(text))] == [
        'set "page_size" to 16'
    ]
    assert child.json_in(line[:40]) == child.json_in('x {"time": "now"}') == []
    assert child.json_in("WARNING engine.x: few") == []


def test_a_json_warning_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "from deploy.serve_state import serve_log; import logging\n"
        "serve_log.set_up('INFO', 'json')\n"
        "logging.getLogger('deploy.x').info('loaded')\n"
        "logging.getLogger('deploy.x').warning('few graphs')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    output = child._Output(process, None, verbose=False)
    output.start()
    assert process.wait(60) == 0
    output.join(60)
    assert capsys.readouterr().err == "warning: deploy.x: few graphs\n"


@pytest.mark.parametrize(
    "probe", ["GET /health 200 1.0ms", "GET /metrics 200 9.9ms", "GET /llm/v2/health 503 1.0ms"]
)
def test_probes_have_no_access_line(probe: str) -> None:
    def record(message: str, access: bool = True) -> logging.LogRecord:
        made = logging.LogRecord("ray.serve", logging.INFO, "", 0, message, None, None)
        made.serve_access_log = access
        return made

    assert not serve_log.is_news(record(probe))
    assert serve_log.is_news(record("POST /v1/completions 200 9.9ms"))
    assert serve_log.is_news(record("GET /healthy 404 9.9ms"))
    assert serve_log.is_news(record(probe, access=False))


def test_requests_that_are_given_back_leave_no_traceback() -> None:
    def failed(error: Exception) -> logging.LogRecord:
        info = (type(error), error, None)
        return logging.LogRecord("ray.serve", logging.ERROR, "", 0, "Request failed.", None, info)

    assert not serve_log.is_news(failed(EngineDrainingError("the ingress was silent")))
    assert not serve_log.is_news(failed(EngineDeadError("gone")))
    assert serve_log.is_news(failed(KeyError("a bug")))


def test_a_replicas_own_lines_have_level_and_name() -> None:
    """In a process of its own: the loggers are the whole process's."""
    code = (
        "import logging; from deploy.serve_state import serve_log\n"
        "for _ in range(2): serve_log.set_up('WARNING')\n"
        "assert logging.getLogger('ray.serve').filters == [serve_log.is_news]\n"
        "logging.getLogger('deploy.replica.engine_replica').warning('gone')\n"
        "logging.getLogger('engine.x').info('unseen')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.stderr == "WARNING deploy.replica.engine_replica: gone\n"
    match = child.OUR_WARNING.search(f"(ServeReplica:llm:engine pid=1) {ran.stderr}")
    assert match is not None and match[2] == "deploy.replica.engine_replica: gone"


# --- the folder


def test_folders_of_killed_launches_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of launches that run, nor what others named alike."""
    parent = Path(f"/tmp/{secrets.token_hex(2)}")
    parent.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(parent))
    for name in ("manta-mine", "manta-checkout", "manta-12345678"):
        (parent / name).mkdir()
        (parent / name / "launcher").write_text("")
    code = (
        "import subprocess, sys, time; from deploy.start.folder import launch_folder\n"
        "with launch_folder() as made:\n"
        "    sleep = subprocess.Popen(['sleep', '60'], pass_fds=[made.lock_fd])\n"
        "    print(made.path, sleep.pid, flush=True); time.sleep(60)"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    path, its_child = killed.stdout.readline().split()
    left = Path(path)
    with launch_folder() as one:
        assert left.is_dir(), "its launch runs"
        killed.kill()
        killed.wait()
        with launch_folder():
            assert left.is_dir(), "its child runs, and uses the folder"
        os.kill(int(its_child), signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{its_child}").exists())
        with launch_folder() as other:
            assert not left.exists()
            assert one.path.is_dir() and other.path.is_dir()
    assert len(list(parent.iterdir())) == 3, "what others made stays"
    shutil.rmtree(parent)


def test_no_place_for_the_folder_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")
    with pytest.raises(ConfigError, match="set TMPDIR"), launch_folder():
        pass


# --- the terminal


def test_a_terminal_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the launcher nor the thread that must read on."""
    read = ""
    leader, terminal = os.openpty()
    # Closing it fails, too: what wasn't written is still to be.
    with suppress(OSError), os.fdopen(terminal, "w") as gone:
        os.close(leader)
        with pytest.raises(OSError):
            print("x", file=gone, flush=True)
        child.say("x", to=gone)
        monkeypatch.setattr("sys.stderr", gone)
        code = "for i in range(20000): print('WARNING engine.x: many a line', i)"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        output = child._Output(process, None, verbose=False)
        output.start()
        assert process.wait(30) == 0
        output.join(30)
        monkeypatch.undo()
        read = output.last_lines[-1]
    assert read.endswith("19999\n")


# --- the command


def test_check_starts_nothing_and_says_what_would_be(
    capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    assert cli.main(["check", "configs/llama-pp2.yaml", "--port", str(free_port)]) == 0
    out = capsys.readouterr().out
    assert "tp 1 pp 2" in out and f"port {free_port}" in out and out.endswith("ok\n")
    # What `serve` refuses, `check` refuses.
    address = ["--host", "127.0.0.2", "--port", str(free_port)]
    assert cli.main(["check", "configs/llama.yaml", *address]) == 2
    assert "--no-haproxy" in capsys.readouterr().err
    assert cli.main(["check", "configs/llama.yaml", "--no-haproxy", *address]) == 0
    capsys.readouterr()
    assert cli.main(["check", "configs/llama.yaml", "--set", "page_size=0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: configs/llama.yaml: page_size") and error.count("\n") == 1


def test_a_busy_port_ends_the_command_with_one_sentence(
    capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        for command in ("serve", "check"):
            assert cli.main([command, SMALL, "--port", str(free_port)]) == 2
            error = capsys.readouterr().err
            assert "Address already in use" in error and error.count("\n") == 1


def test_an_older_python_is_told_so() -> None:
    """Run by this Python with another version in its mouth."""
    code = (
        "import sys, collections; V = collections.namedtuple('V', 'major minor');"
        "sys.version_info = V(3, 9); sys.version = '3.9.2 (main)'; import deploy.launch"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr == "error: Manta needs Python 3.11 or newer, not 3.9.2.\n"


def test_ready_lines_hold_a_curl_that_works(free_port: int) -> None:
    from deploy.start.banner import loading_lines, ready_lines

    target = load_target(SMALL, [], host="0.0.0.0", port=free_port)
    lines = loading_lines(target, Path("/x.log"), ["careful"]) + ready_lines(target, 12.3)
    assert len(lines) <= 10
    assert f"http://127.0.0.1:{free_port}/v1" in lines[-2] and "12 s" in lines[-2]
    *_, body = shlex.split(lines[-1])
    assert json.loads(body)["model"] == "manta-small"
    named = load_target(SMALL, ["served_model_name=it's"], host="::1", port=free_port)
    *_, body = shlex.split(ready_lines(named, 1.0)[-1])
    assert json.loads(body)["model"] == "it's"
    assert f"http://[::1]:{free_port}/v1" in ready_lines(named, 1.0)[0]
