"""The pages' files and headers, and `GET /debug/status` over a fake engine."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy.http.api import access_rules, build_api
from deploy.http.pages.pages import ASSETS, PAGES
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.options import ServerOptions
from tests.support.api_calls import call
from tests.support.fake_client import FakeEngineClient
from tests.support.source_files import ROOT

STATIC = ROOT / "deploy/http/pages/static"
LIBRARY = "htm-preact.js"
NAMES = sorted(path.name for path in STATIC.iterdir() if not path.name.endswith(".LICENSE"))


@pytest.mark.parametrize("path", [*PAGES, *(ASSETS + n for n in NAMES if ".html" not in n)])
def test_every_file_is_served_strictly(path: str) -> None:
    reply = call(FakeEngineClient(), "GET", path)
    assert reply.status_code == 200
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    name = path.removeprefix(ASSETS) if path.startswith(ASSETS) else f"{path[1:]}.html"
    assert reply.content == (STATIC / name).read_bytes()
    kind = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
    assert reply.headers["content-type"].startswith(kind.get(name.rpartition(".")[2], "image/svg"))
    again = call(FakeEngineClient(), "GET", path, headers={"if-none-match": reply.headers["etag"]})
    assert again.status_code == 304 and not again.content


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fpages.py", "htm-preact.LICENSE"])
def test_no_other_file_is_served(name: str) -> None:
    assert call(FakeEngineClient(), "GET", ASSETS + name).status_code in (400, 404)


def test_nothing_foreign_and_nothing_inline() -> None:
    for name in NAMES:
        text = (STATIC / name).read_text()
        urls = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert name == LIBRARY or urls == set(), name
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text), name
        elif name != LIBRARY:
            assert "innerHTML" not in text and "eval(" not in text, name


def test_the_library_is_the_one_that_its_licence_names() -> None:
    licence = (STATIC / "htm-preact.LICENSE").read_text()
    assert hashlib.sha256((STATIC / LIBRARY).read_bytes()).hexdigest() in licence
    assert "MIT License" in licence and "Apache License" in licence


def test_the_wheel_has_the_files() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert data["package-data"]["deploy.http.pages"] == ["static/*"]


def test_pages_need_no_key_and_the_status_an_admins() -> None:
    rules = access_rules(build_api(lambda: ServedModels(FakeEngineClient())))
    assert {rules.level("GET", path) for path in [*PAGES, ASSETS + "chat.js"]} == {"open"}
    assert rules.level("POST", "/chat") != "open"
    assert rules.level("GET", "/debug/status") == "admin"


def test_status_of_engines_and_ingresses() -> None:
    body = call(FakeEngineClient(), "GET", "/debug/status").json()
    (model,) = body["models"]
    assert (model["model"], model["target_replicas"]) == ("fake", 1)
    (replica,) = model["replicas"]
    assert (replica["place"], replica["state"]) == (1, "serving")
    assert replica["roles"] == [{"role": "worker 0", "pid": 7, "wrong": ""}]
    (ingress,) = body["ingresses"]
    assert ingress["in_flight"] == 0


def test_only_a_server_with_keys_asks_for_one(tmp_path: Path) -> None:
    """It is said without a key. The pages have their field if it is true."""
    found = call(FakeEngineClient(), "GET", ASSETS + "access.json")
    assert found.json() == {"keys": False} and "etag" not in found.headers
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [{"name": "a", "sha256": "0" * 64}]}))
    settings = ApiSettings(ServerOptions(api_keys_file=str(keys)))
    found = call(FakeEngineClient(), "GET", ASSETS + "access.json", api_settings=settings)
    assert (found.status_code, found.json()) == (200, {"keys": True})
