"""For pytest: runs tests without their guards, once for each of `MUTATIONS`, and wants failures."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.mutations.guards import MUTATIONS
from tests.mutations.mutation import Mutation


@pytest.fixture
def mutation() -> None:
    """Given by `pytest_generate_tests`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    found = [m for m in MUTATIONS if m.test == metafunc.definition.nodeid]
    if found:
        metafunc.fixturenames.append("mutation")
        metafunc.parametrize("mutation", found, ids=str)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    items[:] = [i for i in items if hasattr(i, "callspec") and "mutation" in i.callspec.params]
    missing = {m.test for m in MUTATIONS} - {i.nodeid.partition("[")[0] for i in items}
    assert not missing, f"there are no tests {sorted(missing)}"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, bool | None, bool | None]:
    mutation: Mutation = pyfuncitem.callspec.params["mutation"]
    with pytest.MonkeyPatch.context() as patch:
        mutation.apply(patch)
        with pytest.raises(mutation.raises, match=mutation.match):
            yield
    return True
