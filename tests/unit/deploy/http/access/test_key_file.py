"""The keys file: what is read, what is refused, and when a change takes effect."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from deploy.http.access import key_file
from deploy.http.access.key_file import MAX_KEY_BYTES, KeyFile, read_keys
from deploy.http.access.options import check_access
from engine.errors import ConfigError, RequestError
from tests.support.api_keys import entry, write_keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "CHECK_EVERY_S", 0.0)


def test_keys_are_found(path: Path) -> None:
    write_keys(path, entry("a", max_running=4), entry("b", role="admin"))
    keys = KeyFile(str(path))
    a, b = keys.find([b"a"]), keys.find([b"wrong", b"b"])
    assert a is not None and a.name == "a" and a.role == "user" and a.max_running == 4
    assert b is not None and b.role == "admin"
    for secrets in ([], [b""], [b"A"], [b"a "], [b"x" * (MAX_KEY_BYTES + 1)]):
        assert keys.find(secrets) is None


def test_a_change_takes_effect(path: Path, no_wait: None) -> None:
    write_keys(path, entry("a"))
    keys = KeyFile(str(path))
    assert keys.find([b"a"]) is not None
    write_keys(path, entry("b"))
    assert keys.find([b"a"]) is None and keys.find([b"b"]) is not None


@pytest.mark.parametrize("change", ["keys: [", "keys: 3", "", "gone", "\xff"])
def test_keys_stay_when_a_change_cannot_be_read(
    path: Path, no_wait: None, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_keys(path, entry("a"))
    keys = KeyFile(str(path))
    assert keys.find([b"a"]) is not None
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(change.encode("latin-1"))
    with caplog.at_level(logging.ERROR):
        assert all(keys.find([b"a"]) is not None for _ in range(5))
    assert len(caplog.records) == 1, "said once"
    write_keys(path, entry("b"))
    assert keys.find([b"a"]) is None and keys.find([b"b"]) is not None


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ([entry("a"), entry("a")], "two keys have the name a"),
        ([entry("a"), {**entry("b"), "sha256": entry("a")["sha256"]}], "the sha256"),
        ([entry("a/b")], "keys.0.name"),
        ([entry("")], "keys.0.name"),
        ([{**entry("a"), "sha256": "0" * 63}], "keys.0.sha256"),
        ([{**entry("a"), "sha256": "A" * 64}], "keys.0.sha256"),
        ([{"name": "a"}], "keys.0.sha256"),
        ([entry("a", role="root")], "keys.0.role"),
        ([entry("a", max_running=0)], "keys.0.max_running"),
        ([entry("a", tokens_per_minute="many")], "keys.0.tokens_per_minute"),
        ([entry("a", limit=3)], "keys.0.limit"),
    ],
)
def test_wrong_files_are_refused(path: Path, entries: list[dict[str, object]], names: str) -> None:
    write_keys(path, *entries)
    with pytest.raises(ConfigError, match=names):
        read_keys(str(path))


def test_an_error_does_not_quote_the_file(path: Path) -> None:
    path.write_text("keys:\n- name: a\n  sha256: SECRETSECRET\n")
    with pytest.raises(ConfigError) as error:
        read_keys(str(path))
    assert "SECRET" not in str(error.value)


def test_configuration(path: Path, tmp_path: Path) -> None:
    write_keys(path)
    check_access(None, None, [])
    check_access(None, "none", ["https://a.example", "http://localhost:3000"])
    for keys_file, auth, origins, names in (
        (None, "keys", [], "api_keys_file"),
        (str(path), "none", [], "auth: none"),
        (str(path), None, [], "no key"),
        (str(tmp_path / "other"), None, [], "can't be read"),
        (None, None, ["*"], "cors_origins"),
        (None, None, ["https://a.example/"], "cors_origins"),
    ):
        with pytest.raises(ConfigError, match=names):
            check_access(keys_file, auth, origins)


def test_priorities(path: Path) -> None:
    write_keys(path, entry("a"), entry("b", lowest_priority=5), entry("c", lowest_priority=-5))
    a, b, c = read_keys(str(path))
    assert (a.priority(0), a.priority(3)) == (0, 3)
    assert (b.priority(0), b.priority(5), b.priority(9)) == (5, 5, 9)
    assert (c.priority(0), c.priority(-5)) == (0, -5)
    for key, given in ((a, -1), (b, 4), (b, -1), (c, -6)):
        with pytest.raises(RequestError) as error:
            key.priority(given)
        assert error.value.param == "priority"
