"""Every type of text model that transformers knows: its tokens, or a refusal in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.checkpoint.tried_types import TriedType, read_tried_types
from tests.models.ranks import Ranks
from tests.models.trial import FEATURES, TYPES, try_type


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_it_gives_the_tokens_of_transformers_or_is_refused(
    kind: str,
    tmp_path: Path,
    ranks: Ranks,
    found: dict[str, TriedType],
    pytestconfig: pytest.Config,
) -> None:
    tried = found[kind] = try_type(kind, tmp_path, ranks)
    assert tried.state != "wrong", tried.sentence
    before = read_tried_types().get(kind)
    if before is None or not before.runs or pytestconfig.getoption("--write"):
        return
    assert tried.runs, f"it ran when the table was written, and now: {tried.sentence}"
    for name in FEATURES:
        then, now = getattr(before, name), getattr(tried, name)
        assert then != "" or now == "", f"{name} worked when the table was written, and now: {now}"
