"""`Mutation`: a guard of the code is taken out, and a test that relies on it has to fail."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

from benchmarks.common import REPO_ROOT


class Edit(NamedTuple):
    """In a file of the repository, the text `guard`, which stands there exactly once, becomes
    `instead`. It lies within one function."""

    file: str
    guard: str
    instead: str


class Mutation(NamedTuple):
    """What is edited, and how a test fails then."""

    test: str
    """File::name."""
    match: str
    """Regular expression in the failure's text: it has to fail for this reason."""
    edits: tuple[Edit, ...]
    raises: type[BaseException]

    def __str__(self) -> str:
        return "+".join(dict.fromkeys(edit.file.rpartition("/")[2] for edit in self.edits))

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Take the guard out. Fails if it isn't there exactly once."""
        for file in dict.fromkeys(edit.file for edit in self.edits):
            _edit(file, [edit for edit in self.edits if edit.file == file], patch)


def mutation(
    file: str,
    test: str,
    match: str,
    *edits: Edit,
    raises: type[BaseException] = AssertionError,
) -> Mutation:
    """A `Mutation` for a test of a file."""
    return Mutation(f"{file}::{test}", match, edits, raises)


def _edit(file: str, edits: list[Edit], patch: pytest.MonkeyPatch) -> None:
    """Give the functions that the edits lie in the code that they have with them."""
    source = (REPO_ROOT / file).read_text()
    edited: set[str] = set()
    for edit in edits:
        count = source.count(edit.guard)
        assert count == 1, f"{file} has {count} times {edit.guard!r}, not once"
        edited.add(_function_at(source, source.index(edit.guard)))
        source = source.replace(edit.guard, edit.instead)
    codes = dict(_codes(compile(source, file, "exec", dont_inherit=True)))
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    for name in edited:
        patch.setattr(_function(module, name), "__code__", codes[name])


def _function_at(source: str, offset: int) -> str:
    """Qualified name of the outermost function around a place of the text."""
    line = source.count("\n", 0, offset) + 1
    node: ast.AST = ast.parse(source)
    names: list[str] = []
    while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node = next(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and child.lineno <= line <= (child.end_lineno or 0)
        )
        names.append(node.name)
    return ".".join(names)


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """All code within `code`, by qualified name."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant)


def _function(module: object, qualified_name: str) -> FunctionType:
    found: Any = module
    for name in qualified_name.split("."):
        found = inspect.getattr_static(found, name)
    found = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", found))
    assert isinstance(found, FunctionType), f"{qualified_name} is no plain function"
    return found
