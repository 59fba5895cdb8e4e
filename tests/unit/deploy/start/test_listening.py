"""Who may reach a server without a key, and TLS."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from deploy.http.access.listening import check_listening
from deploy.launch import main
from deploy.start import haproxy, preflight
from deploy.start.target import load_target
from deploy.start.tls import check_tls, without_tls
from engine.errors import ConfigError
from tests.support.api_keys import entry, write_keys
from tests.support.certificates import make_certificate

SMALL = "models/manta-small"
OTHERS = ["0.0.0.0", "::", "10.1.2.3", "example.com"]


@pytest.mark.parametrize("host", [*OTHERS, "127.0.0.1", "::1", "localhost"])
def test_a_server_that_others_can_reach_warns_of_clear_text(host: str) -> None:
    warnings = preflight.check_machine(load_target(SMALL, [], host=host))
    assert ["TLS" in warning for warning in warnings] == [True] * (host in OTHERS)


def test_listening_for_others_needs_keys_or_a_word(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", entry("a"))

    def refusal(host: str, *overrides: str) -> str:
        server = load_target(SMALL, list(overrides), host=host).applications[0].server
        try:
            check_listening(server.api_keys_file, server.auth, host)
        except ConfigError as error:
            return str(error)
        return ""

    for host in OTHERS:
        assert "api_keys_file" in refusal(host) and "auth: none" in refusal(host)
        assert refusal(host, "auth=none") == refusal(host, f"api_keys_file={keys}") == ""
    for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        assert refusal(host) == ""


def test_the_start_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([SMALL, "--host", "0.0.0.0"]) == 2
    assert "auth: none" in capsys.readouterr().err


def test_certificates_are_checked(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    other, _ = make_certificate(tmp_path, "other")
    (tmp_path / "empty").write_text("")
    check_tls({})
    check_tls({"ssl_certfile": cert, "ssl_keyfile": key})
    for given, names in (
        ((cert, None), "set both"),
        ((None, key), "set both"),
        ((cert, str(tmp_path / "gone")), "ssl_keyfile .*can't be read"),
        ((other, key), "can't be used together"),
        ((str(tmp_path / "empty"), key), "can't be used together"),
    ):
        with pytest.raises(ConfigError, match=names):
            check_tls(dict(zip(("ssl_certfile", "ssl_keyfile"), given, strict=True)))


def test_the_key_that_haproxy_reads_is_private(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    http = {"ssl_certfile": cert, "ssl_keyfile": key}
    path = haproxy.join_pem(tmp_path, http)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == Path(cert).read_bytes() + b"\n" + Path(key).read_bytes()
    config = without_tls({"http_options": {**http, "port": 1}, "applications": []})
    assert config == {"http_options": {"port": 1}, "applications": []}
