"""The table "Layers, and who may import whom" of docs/architecture.md, held against every file."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.source_files import ROOT, imports_of


@dataclass
class Layer:
    """A row of the table. `may_import` includes the layer itself; `is_all`: "all above"."""

    name: str
    paths: list[str]
    may_import: set[str]
    is_all: bool
    loads_torch: bool
    loads_ray: bool

    def holds(self, path: Path) -> bool:
        return any(p == str(path) or (p[-1] == "/" and str(path).startswith(p)) for p in self.paths)


def read_table() -> list[Layer]:
    text = (ROOT / "docs/architecture.md").read_text().partition("## Layers, and who")[2]
    rows = re.findall(r"^\| (.+?) \| (`.+?) \|(.*?)\| (yes|no) \| (yes|no) \|$", text, re.M)
    layers: list[Layer] = []
    for name, holds, may, torch, ray in rows:
        above = [layer.name for layer in layers]
        words = {word.strip() for word in may.split(",") if word.strip()}
        is_all = "all above" in may
        if is_all:
            words = set(above) - {may.partition("except ")[2].strip()}
        unknown = words - set(above)
        assert not unknown, f"{name}: {unknown} stand in no row above it"
        paths = re.findall(r"`(.+?)`", holds)
        layers.append(Layer(name, paths, {name, *words}, is_all, torch == "yes", ray == "yes"))
    return layers


LAYERS = read_table()
FILES = [
    path.relative_to(ROOT)
    for folder in ("engine", "deploy", "benchmarks/load", ".")
    for path in sorted((ROOT / folder).glob("serve_app.py" if folder == "." else "**/*.py"))
]


def dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in FILES}


def layer_of(path: Path) -> Layer:
    (layer,) = (layer for layer in LAYERS if layer.holds(path))
    return layer


IMPORTS = {
    module: set(imports_of(path)) & MODULES.keys() - {module} for module, path in MODULES.items()
}

TRITON = {module for module, path in MODULES.items() if "triton" in imports_of(path)}
"""Files that can be imported only where Triton is installed."""


def test_every_file_is_in_one_row() -> None:
    assert len(LAYERS) > 20
    for path in FILES:
        rows = [layer.name for layer in LAYERS if layer.holds(path)]
        assert len(rows) == 1, f"{path} is in {rows or 'no row'}"
        relative = re.search(r"^\s*from \.", (ROOT / path).read_text(), re.M)
        assert relative is None, f"{path} has a relative import"
    for layer in LAYERS:
        for name in layer.paths:
            assert (ROOT / name).exists(), f"{layer.name}: {name} doesn't exist"


def test_no_import_points_up() -> None:
    wrong = [
        f"{path} ({layer.name}) imports {name} ({layer_of(MODULES[name]).name})"
        for module, path in MODULES.items()
        for layer in [layer_of(path)]
        for name in sorted(IMPORTS[module])
        if layer_of(MODULES[name]).name not in layer.may_import
    ]
    assert not wrong, "\n".join(wrong)


def test_what_is_shipped_imports_nothing_else() -> None:
    """The wheel has the table's files, and no other of benchmarks/, tests/ and scripts/."""
    other = re.compile(r"(benchmarks(?!\.load\b)|tests|scripts)\b")
    wrong = [
        f"{path} imports {name}" for path in FILES for name in imports_of(path) if other.match(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_allows_no_more_than_is_used() -> None:
    used: dict[str, set[str]] = {layer.name: {layer.name} for layer in LAYERS}
    for module, path in MODULES.items():
        used[layer_of(path).name] |= {layer_of(MODULES[name]).name for name in IMPORTS[module]}
    for layer in LAYERS:
        if not layer.is_all:
            assert layer.may_import == used[layer.name], layer.name


def test_no_circle() -> None:
    """Files that nothing left imports are taken away until none is left."""
    left = {module: set(names) for module, names in IMPORTS.items()}
    while left:
        free = [module for module, names in left.items() if not names & left.keys()]
        assert free, f"these import each other in a circle: {sorted(left)}"
        for module in free:
            del left[module]


def test_triton_is_loaded_where_its_kernels_are_used() -> None:
    """Files that import it have kernels only, and others name them in a call that imports them."""
    assert TRITON
    assert [module for module, names in IMPORTS.items() if names & TRITON] == []


@pytest.mark.parametrize("package", ["torch", "ray"])
def test_what_is_loaded(package: str) -> None:
    """In one process per package: import all files of the rows that must not load it."""
    modules = [
        module
        for module, path in MODULES.items()
        if not (layer_of(path).loads_torch if package == "torch" else layer_of(path).loads_ray)
        and module not in TRITON
    ]
    assert len(modules) > 50
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[2:]:\n"
        "    importlib.import_module(name)\n"
        "    assert sys.argv[1] not in sys.modules, f'{name} loads {sys.argv[1]}'\n"
    )
    command = [sys.executable, "-c", code, package, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
