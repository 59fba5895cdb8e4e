"""`WindowPages` and the memory that it saves; any order of events is tried in
tests/unit/scheduler/test_scheduler_stateful.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import KVPoolError
from engine.kvcache.window_pages import WindowPages
from engine.memory_need import CacheSize, WindowNeed
from tests.support.scheduler_configs import scheduler_config


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def windows_of(**keys: Any) -> WindowNeed | None:
    values: dict[str, Any] = dict(
        max_model_len=8192, num_kv_tokens=10_000, page_size=16, chunked_prefill_size=512, window=128
    )
    return scheduler_config(**{**values, **keys}).windows


def test_a_page_that_was_left_is_taken_when_none_is_free() -> None:
    """Pages of one token, a window of 3: the next token of a request sees the last 2."""
    windows = WindowPages(20, 6, page_size=1, reach=3)
    table = np.zeros((3, 20), np.int32)
    table[1, :4] = pages(1, 2, 3, 4)
    windows.begin(1, pages())
    windows.attach(pages(1, 2, 3, 4))
    windows.advance(table, np.array([1]), np.array([4]))
    assert windows.available == 4  # two are free, two were left
    windows.attach(pages(5, 6))
    assert windows.usable(pages(1, 2, 3, 4)) == 4
    windows.attach(pages(7))  # takes that of page 1
    changes = windows.take_changes()
    assert changes is not None and windows.take_changes() is None
    assert dict(changes.T.tolist()) == {1: 0, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 1}
    windows.attach(pages(8))  # and of page 2
    with pytest.raises(KVPoolError, match="1 window pages are needed and 0 are left"):
        windows.attach(pages(9))
    # A prefix of 4 needs the pages 3 and 4, one of 3 the dead page 2.
    assert windows.usable(pages(1, 2, 3, 4)) == 4
    assert windows.usable(pages(1, 2, 3)) == 0
    windows.end(1, table[1, :4])
    assert windows.available == 2
    windows.check_integrity(0)
    windows.check_pages()


def test_copies_revive_a_prefix() -> None:
    windows = WindowPages(20, 4, page_size=2, reach=2)
    windows.attach(pages(1, 2))
    windows.detach(pages(1, 2))
    windows.begin(1, pages())
    windows.attach(pages(3, 4))
    assert windows.usable(pages(1, 2)) == 0
    windows.end(1, np.arange(6, 10, dtype=np.int32))
    windows.heal(pages(1, 2), pages(3, 4))
    assert windows.usable(pages(1, 2)) == 2 and windows.usable(pages(3, 4)) == 0
    windows.check_integrity(0)
    windows.check_pages()


def test_sizes() -> None:
    """A request of 4,096 tokens holds 176 in a window of 128: less than an eighth."""
    found = windows_of()
    assert found is not None and found.reach == 128
    assert found.per_request == 128 + 16 + 32 and found.per_step == 528
    uneven = windows_of(chunked_prefill_size=500)
    assert uneven is not None and uneven.per_step == 528
    assert found.ratio == 0.125
    size = CacheSize(((100, 200),), found)
    assert found.tokens(20_000) == 2_500 // 16 * 16
    assert size.num_bytes(20_000) == 20_000 * 100 + found.tokens(20_000) * 200
    assert size.tokens_in(10_000 * 300) == pytest.approx(24_000, rel=0.01)
    longer = windows_of(window=1024)
    assert longer is not None and longer.ratio == pytest.approx(1072 / 4096)
    assert found.slots(700) is None  # no more than a step and a request need


@pytest.mark.parametrize(
    "keys",
    [
        {"window": None},
        {"swa_full_tokens_ratio": 1.0},
        {"window": 4096},
        {"max_model_len": 150},
        {"chunked_prefill_size": -1},  # a step may be as long as the cache
    ],
)
def test_where_all_layers_have_the_same_room(keys: dict[str, Any]) -> None:
    assert windows_of(**keys) is None


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=3),
    st.integers(0, 10**8),
    st.floats(0.01, 1.0),
)
def test_tokens_are_the_most_that_fit(
    stages: list[tuple[int, int]], num_bytes: int, ratio: float
) -> None:
    window = WindowNeed(64, 16, 112, 528, ratio)
    size = CacheSize(tuple(stages), window)
    tokens = size.tokens_in(num_bytes)
    assert size.num_bytes(tokens) <= num_bytes
    assert size.num_bytes(tokens + 1) > num_bytes or tokens == 2**30


def test_a_ratio_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="swa_full_tokens_ratio"):
        EngineConfig(swa_full_tokens_ratio=1.5)
