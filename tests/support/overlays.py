"""The overlays of `k8s/`, rendered once."""

from __future__ import annotations

import copy
import shutil
from functools import cache

import pytest

from tests.k8s.manifests import Document, render
from tests.support.source_files import ROOT

OVERLAYS = tuple(sorted(path.name for path in (ROOT / "k8s/overlays").iterdir()))
COMPONENTS = (
    *("k8s/components/ingress", "k8s/components/gateway", "k8s/components/files"),
    "k8s/monitoring",
)
"""What an overlay of one's own may add."""
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")


def overlay(name: str) -> list[Document]:
    """A copy of a rendered overlay."""
    return copy.deepcopy(_rendered(name))


def with_components(name: str, folder: str) -> str:
    """A kustomization of the overlay with all components. `folder` is one of the repository."""
    up = "/".join([".."] * len(folder.strip("/").split("/")))
    lines = ["resources:", f"  - {up}/k8s/overlays/{name}", "components:"]
    return "\n".join([*lines, *(f"  - {up}/{component}" for component in COMPONENTS)]) + "\n"


@cache
def _rendered(name: str) -> list[Document]:
    return render(f"k8s/overlays/{name}")
