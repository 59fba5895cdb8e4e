"""The results of all types, for the table that is shipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers

from engine.checkpoint.tried_types import (
    TriedType,
    TriedTypes,
    read_tried_types,
    write_tried_types,
)
from tests.models.ranks import Ranks
from tests.models.trial import FEATURES

_FOUND = pytest.StashKey[dict[str, TriedType]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="put the results into the table")


def pytest_configure(config: pytest.Config) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config.stash[_FOUND] = {}


@pytest.fixture
def found(request: pytest.FixtureRequest) -> dict[str, TriedType]:
    """Results of this run by type; tests put theirs in."""
    return request.config.stash[_FOUND]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.stop()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found, known = config.stash[_FOUND], read_tried_types()
    counts = {
        state: sum(tried.state == state for tried in found.values())
        for state in ("native", "transformers", "refused", "wrong")
    }
    words = ", ".join(f"{number} {state}" for state, number in counts.items())
    able = {name: sum(getattr(one, name) == "" for one in found.values()) for name in FEATURES}
    words += "; of these " + ", ".join(f"{number} {name}" for name, number in able.items())
    terminalreporter.write_line(f"{len(found)} types: {words}")
    if config.getoption("--write"):
        merged = {tried.type: tried for tried in known.types} | found
        write_tried_types(TriedTypes(transformers.__version__, tuple(merged.values())))
        return
    better = [kind for kind, tried in found.items() if tried.runs and not _ran(known, kind)]
    if better:
        terminalreporter.write_line(
            f"these run now and the table doesn't say so (--write): {', '.join(better)}"
        )


def _ran(known: TriedTypes, kind: str) -> bool:
    tried = known.get(kind)
    return tried is not None and tried.runs
