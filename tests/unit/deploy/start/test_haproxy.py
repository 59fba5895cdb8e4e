"""HAProxy around Ray Serve: what a launch sets for it, and the wrapper that closes its pages."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploy.launch import main
from deploy.start import haproxy
from deploy.start.folder import launch_folder
from deploy.start.ports import PortBlock
from engine.errors import ConfigError
from tests.support.certificates import make_certificate


def configured(folder: Path, **http_options: object) -> dict[str, str]:
    with PortBlock() as ports:
        return haproxy.environment("/bin/echo", folder, http_options, ports)


def run_wrapper(env: dict[str, str], config: Path) -> subprocess.CompletedProcess[str]:
    wrapper = env["RAY_SERVE_HAPROXY_BINARY_PATH"]
    return subprocess.run(
        [wrapper, "-db", "-f", str(config), "-dR"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


def rendered(stats: str, metrics: str) -> str:
    """What Ray's own template gives."""
    from jinja2 import Environment
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    jinja = Environment()
    jinja.filters["haproxy_fmt"] = str
    settings = {
        "stats_port": stats,
        "metrics_port": metrics,
        "frontend_host": "*",
        "frontend_port": 8000,
    }
    return jinja.from_string(HAPROXY_CONFIG_TEMPLATE).render(config=settings, route_info={})


def test_two_launches_share_no_port_and_no_file(tmp_path: Path) -> None:
    envs = []
    with PortBlock() as one, PortBlock() as two:
        for name, ports in (("a", one), ("b", two)):
            (tmp_path / name).mkdir()
            envs.append(haproxy.environment("/bin/echo", tmp_path / name, {}, ports))
    numbers = [{int(v) for k, v in env.items() if k.endswith("_PORT")} for env in envs]
    assert [len(own) for own in numbers] == [4, 4]
    assert max(numbers[0]) <= min(numbers[1]), "the end of a range isn't in it"
    paths = [
        {value for key, value in env.items() if value.startswith(str(tmp_path))} for env in envs
    ]
    assert len(paths[0]) == 5 and not paths[0] & paths[1]


@pytest.mark.parametrize("launched", [True, False], ids=["launcher", "image"])
def test_pages_leave_the_network_and_the_api_stays_where_it_was(
    tmp_path: Path, launched: bool
) -> None:
    """The launcher's environment; and the image's, with Ray's own ports."""
    env = configured(tmp_path)
    if not launched:
        kept = ("RAY_SERVE_HAPROXY_BINARY_PATH", "MANTA_HAPROXY_BINARY")
        env = {key: env[key] for key in kept}
    config = tmp_path / "haproxy.cfg"
    before = rendered("8404", "9101")
    assert "bind *:8404" in before and "bind :9101" in before
    config.write_text(before)
    for _ in range(2):  # Ray writes the file anew for each reload, or leaves it
        done = run_wrapper(env, config)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["-db", "-f", str(config), "-dR"]
        binds = [line.split()[1:] for line in config.read_text().splitlines() if "bind " in line]
        assert binds == [
            [f"unix@{tmp_path}/metrics.page", "mode", "600"],
            ["*:8000"],
            [f"unix@{tmp_path}/stats.page", "mode", "600"],
        ]


def test_headers_have_to_come_in_time(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(rendered("8404", "9101"))
    for seconds in ("10", "3", "3"):
        env = configured(tmp_path) | (
            {} if seconds == "10" else {"MANTA_HAPROXY_HEADER_S": seconds}
        )
        assert run_wrapper(env, config).returncode == 0
        lines = [line.strip() for line in config.read_text().splitlines()]
        assert lines.count(f"timeout http-request {seconds}s") == 1
        assert sum("timeout http-request" in line for line in lines) == 1
    config.write_text(rendered("8404", "9101").replace("option abortonclose", ""))
    done = run_wrapper(configured(tmp_path), config)
    assert done.returncode == 1 and "wait for headers" in done.stderr


def test_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    env = configured(tmp_path, ssl_certfile=cert, ssl_keyfile=key)
    config = tmp_path / "haproxy.cfg"
    config.write_text(rendered("8404", "9101"))
    for _ in range(2):
        assert run_wrapper(env, config).returncode == 0
        (bind,) = [line for line in config.read_text().splitlines() if "bind *:8000" in line]
        assert bind.count(f"ssl crt {tmp_path}/server.pem") == 1
    config.write_text(rendered("8404", "9101").replace("frontend http_frontend", "frontend other"))
    done = run_wrapper(env, config)
    assert done.returncode == 1 and "TLS" in done.stderr


def test_clients_that_leave_are_noticed(tmp_path: Path) -> None:
    """`splice-request` switches `abortonclose` off."""
    config = tmp_path / "haproxy.cfg"
    config.write_text(rendered("8404", "9101"))
    assert "option splice-request" in config.read_text()
    assert run_wrapper(configured(tmp_path), config).returncode == 0
    assert "splice-request" not in config.read_text()
    assert "option abortonclose" in config.read_text()
    config.write_text(rendered("8404", "9101").replace("splice-request", "splice-auto"))
    done = run_wrapper(configured(tmp_path), config)
    assert done.returncode == 1 and "clients that leave" in done.stderr


def test_the_program_is_never_the_wrapper_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image's environment names the wrapper; a user's may name another HAProxy."""
    rays = haproxy.binary()
    assert rays is not None and Path(rays).name == "haproxy"
    monkeypatch.setenv(haproxy.BINARY_PATH, "/opt/manta/deploy/start/haproxy-wrapper")
    assert haproxy.binary() == rays
    assert os.environ[haproxy.BINARY_PATH].endswith("haproxy-wrapper")
    monkeypatch.setenv(haproxy.BINARY_PATH, "/usr/sbin/haproxy")
    assert haproxy.binary() == "/usr/sbin/haproxy"


def test_the_wrapper_finds_rays_haproxy_by_itself() -> None:
    """As in the image, where nothing names it but the wrapper."""
    env = {k: v for k, v in os.environ.items() if k != "MANTA_HAPROXY_BINARY"}
    env["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(haproxy.WRAPPER)
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run([haproxy.WRAPPER, "-v"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("HAProxy version"), done


def test_a_template_that_hides_its_ports_is_refused(tmp_path: Path) -> None:
    env = configured(tmp_path)
    config = tmp_path / "haproxy.cfg"
    config.write_text("listen stats\n  bind [::]:8404 v6only\n")
    done = run_wrapper(env, config)
    assert done.returncode == 1 and "can't be kept off the network" in done.stderr
    assert done.stdout == ""


def test_streams_outlive_reloads_as_long_as_requests_may_last(tmp_path: Path) -> None:
    key = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
    assert configured(tmp_path, request_timeout_s=900)[key] == "900"
    assert int(configured(tmp_path)[key]) >= 24 * 3600


def test_folder_is_private_and_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with launch_folder() as made:
        name = str(made.path)
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o700
        node_id, longest = "f" * 56, "metrics.page"
        assert len(f"{name}/{node_id}/{longest}.1234567.tmp") <= 107
    assert not Path(name).exists()


def test_host_of_one_interface_is_refused_with_haproxy_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for host in ("127.0.0.1", "localhost", "0.0.0.0"):
        haproxy.check_host(host)
    with pytest.raises(ConfigError, match="--no-haproxy"):
        haproxy.check_host("192.168.1.5")
    if haproxy.binary() is not None:
        assert main(["configs/llama.yaml", "--host", "192.168.1.5", "--set", "auth=none"]) == 2
        assert "--no-haproxy" in capsys.readouterr().err


def test_requests_beyond_the_last_place_are_refused(tmp_path: Path) -> None:
    """HAProxy would let them wait without a word."""
    env = configured(tmp_path)
    refuse_from = int(env["MANTA_HAPROXY_REFUSE_FROM"])
    assert refuse_from < int(env["RAY_SERVE_HAPROXY_MAXCONN"])
    config = tmp_path / "haproxy.cfg"
    config.write_text(rendered("8404", "9101"))
    for _ in range(2):
        assert run_wrapper(env, config).returncode == 0
        rules = [line for line in config.read_text().splitlines() if "fe_conn" in line]
        assert len(rules) == 1 and rules[0].endswith(f"if {{ fe_conn gt {refuse_from} }}")
