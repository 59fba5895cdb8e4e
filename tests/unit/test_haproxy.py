"""HAProxy around Ray Serve: what a launch sets for it, and the wrapper that closes its pages."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from deploy import haproxy
from deploy.launch import main
from engine.errors import ConfigError


def configured(folder: Path, **http_options: object) -> dict[str, str]:
    return haproxy.environment("/bin/echo", folder, http_options)


def run_wrapper(env: dict[str, str], config: Path) -> subprocess.CompletedProcess[str]:
    wrapper = env["RAY_SERVE_HAPROXY_BINARY_PATH"]
    return subprocess.run(
        [wrapper, "-db", "-f", str(config), "-dR"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


def test_two_launches_share_no_port_and_no_file(tmp_path: Path) -> None:
    envs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        envs.append(configured(tmp_path / name))
    ports = [
        env[key]
        for env in envs
        for key in env
        if key.endswith("_PORT") and not key.startswith("RAY_SERVE_DIRECT_INGRESS")
    ]
    assert len(ports) == len(set(ports)) == 8
    paths = [{value for value in env.values() if value.startswith("/")} for env in envs]
    assert len(paths[0]) == 6 and not paths[0] & paths[1]


def test_pages_stay_on_loopback_and_the_api_where_it_was(tmp_path: Path) -> None:
    """On what Ray's own template gives."""
    from jinja2 import Environment
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    env = configured(tmp_path)
    stats, metrics = (env[f"RAY_SERVE_HAPROXY_{n}_PORT"] for n in ("STATS", "METRICS"))
    jinja = Environment()
    jinja.filters["haproxy_fmt"] = str
    config = tmp_path / "haproxy.cfg"
    settings = {
        "stats_port": stats,
        "metrics_port": metrics,
        "frontend_host": "*",
        "frontend_port": 8000,
    }
    rendered = jinja.from_string(HAPROXY_CONFIG_TEMPLATE).render(config=settings, route_info={})
    assert f"bind *:{stats}" in rendered and f"bind :{metrics}" in rendered
    config.write_text(rendered)
    for _ in range(2):  # Ray writes the file anew for each reload, or leaves it
        done = run_wrapper(env, config)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["-db", "-f", str(config), "-dR"]
        binds = [line.split()[1] for line in config.read_text().splitlines() if "bind " in line]
        assert binds == [f"127.0.0.1:{metrics}", "*:8000", f"127.0.0.1:{stats}"]


def test_a_template_that_hides_its_ports_is_refused(tmp_path: Path) -> None:
    env = configured(tmp_path)
    config = tmp_path / "haproxy.cfg"
    config.write_text(f"listen stats\n  bind [::]:{env['RAY_SERVE_HAPROXY_STATS_PORT']} v6only\n")
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
    with haproxy.folder() as name:
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o700
        node_id, longest = "f" * 56, "metrics.sock"
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
        assert main(["configs/llama.yaml", "--host", "192.168.1.5"]) == 2
        assert "--no-haproxy" in capsys.readouterr().err
