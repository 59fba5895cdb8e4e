"""Checks that are run once more without their guard; then they have to fail."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import pytest

C = TypeVar("C", bound=Callable[..., None])
TakeOut = Callable[[pytest.MonkeyPatch], None]


class Guard(NamedTuple):
    """A part of the code that a check relies on, and how the check fails without it."""

    take_out: TakeOut
    raises: type[Exception]
    match: str
    """Regular expression in the failure's text: it has to fail for this reason."""

    def assert_needed(
        self, check: Callable[..., None], patch: pytest.MonkeyPatch, *args: object
    ) -> None:
        """Run `check` without the guard, expecting the failure."""
        self.take_out(patch)
        with pytest.raises(self.raises, match=self.match):
            check(*args)


def guarded_by(take_out: TakeOut, raises: type[Exception], match: str) -> Callable[[C], C]:
    """Decorates a `check_*` function; several guards of one check are tried one by one."""

    def mark(check: C) -> C:
        check.__dict__.setdefault("guards", []).append(Guard(take_out, raises, match))
        return check

    return mark


def checks_of(module: Mapping[str, Any]) -> list[Any]:
    """The `check_*` functions among a module's globals, as pytest parameters."""
    return [
        pytest.param(value, id=name.removeprefix("check_"))
        for name, value in module.items()
        if name.startswith("check_")
    ]


def guards_of(module: Mapping[str, Any]) -> list[Any]:
    """(check, guard) pairs among a module's globals. Raises `KeyError` if a check has none."""
    return [
        pytest.param(check, guard, id=name.removeprefix("check_"))
        for name, check in module.items()
        if name.startswith("check_")
        for guard in check.__dict__["guards"]
    ]


def without(owner: type, name: str, *edits: tuple[str, str]) -> TakeOut:
    """Each (guard, instead) pair of method `name`'s source is replaced.

    A guard that isn't there exactly once fails the test. If the guard moved, change the call.
    """

    def apply(patch: pytest.MonkeyPatch) -> None:
        method: Any = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(method))
        for guard, instead in edits:
            count = source.count(guard)
            assert count == 1, f"{owner.__name__}.{name} has {count} times {guard!r}, not once"
            source = source.replace(guard, instead)
        # compile() inherits this file's postponed annotations.
        code = compile(source, f"<{owner.__name__}.{name} without a guard>", "exec")
        made: dict[str, Any] = {}
        exec(code, method.__globals__, made)
        patch.setattr(owner, name, made[name])

    return apply


def replaced(owner: Any, name: str, value: Any) -> TakeOut:
    """`owner`'s attribute `name` is `value`."""
    return lambda patch: patch.setattr(owner, name, value)
