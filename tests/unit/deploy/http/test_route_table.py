"""The table of routes in docs/api.md names every route, and no other."""

from __future__ import annotations

import re

from starlette.routing import Route

from benchmarks.common import REPO_ROOT
from deploy.http.api import build_api
from deploy.http.served_models import ServedModels
from tests.support.fake_client import FakeEngineClient

HELPERS = {("GET", "/docs/assets/{}"), ("GET", "/pages/{}")}
"""Files of the pages."""


def test_docs_name_every_route() -> None:
    text = (REPO_ROOT / "docs/api.md").read_text()
    table = text[text.index("| route |") :].split("\n\n")[0]
    found = re.findall(r"`((?:GET|POST|DELETE)(?:, (?:GET|POST|DELETE))*) (/[^`?]*)", table)
    documented = {
        (method, re.sub(r"\{.*\}", "{}", path))
        for methods, path in found
        for method in methods.split(", ")
    }
    served = {
        (method, re.sub(r"\{.*\}", "{}", route.path))
        for route in build_api(lambda: ServedModels(FakeEngineClient())).routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert documented == served - HELPERS
