"""Rules about the source files themselves."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.source_files import ROOT, imports_of

MAX_LINES = 700


def python_files(*folders: str) -> list[Path]:
    """Relative to the repository."""
    return [path.relative_to(ROOT) for name in folders for path in (ROOT / name).rglob("*.py")]


def test_no_test_file_is_imported() -> None:
    """What several tests share lives in tests/support."""
    files = python_files("tests", "benchmarks", "scripts")
    tests = {".".join(p.with_suffix("").parts) for p in files if p.name.startswith("test_")}
    assert tests
    wrong = {str(path): found for path in files if (found := tests & set(imports_of(path)))}
    assert wrong == {}


def test_no_file_is_long() -> None:
    """A file that is longer holds two things. One noun is not split for its length."""
    files = python_files("engine", "deploy", "benchmarks")
    files += [path.relative_to(ROOT) for path in (ROOT / "engine" / "csrc").iterdir()]
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in files}
    assert lengths
    assert {path: n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_paths_in_the_documentation_exist() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *ROOT.glob("*/README.md")]
    path = re.compile(r"`((?:engine|deploy|tests|benchmarks|scripts|configs|k8s)/[\w./*-]+)`")
    named = [(page.name, found) for page in pages for found in path.findall(page.read_text())]
    assert len(named) > 100
    assert [(page, p) for page, p in named if not any(ROOT.glob(p.rstrip("/")))] == []


def test_names_of_the_glossary_exist() -> None:
    """Each name is defined in one of the files of its line, or is a field or an argument there."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## Glossary\n")[2].partition("\n## ")[0]
    lines = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(lines) > 30
    code = re.compile(r"`([^`]+)`")
    for _, _, here, files, _, _ in lines:
        text = "".join((ROOT / name).read_text() for name in code.findall(files))
        for name in code.findall(here):
            defined = re.compile(rf"^ *(?:class |def |self\.)?{name}\b *[(:=]", re.MULTILINE)
            assert defined.search(text), f"{name} is in none of {files.strip()}"
