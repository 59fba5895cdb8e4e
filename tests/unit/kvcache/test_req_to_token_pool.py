from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.kvcache import KVPoolError, ReqToTokenPool


class PoolMachine(RuleBasedStateMachine):
    """Rows against a plain set of the rows that are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ReqToTokenPool(size=5, max_context_len=8)
        self.taken: set[int] = set()

    @rule()
    def alloc(self) -> None:
        idx = self.pool.alloc()
        if len(self.taken) == self.pool.size:
            assert idx is None
        else:
            assert idx is not None
            assert 1 <= idx <= self.pool.size
            assert idx not in self.taken
            self.taken.add(idx)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        idx = data.draw(st.sampled_from(sorted(self.taken)))
        self.pool.free(idx)
        self.taken.remove(idx)

    @rule(idx=st.integers(-2, 8))
    def free_what_is_not_taken(self, idx: int) -> None:
        if idx not in self.taken:
            with pytest.raises(KVPoolError):
                self.pool.free(idx)

    @invariant()
    def rows_are_conserved(self) -> None:
        assert self.pool.available_size() + len(self.taken) == self.pool.size


def test_against_model() -> None:
    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=50, stateful_step_count=40)
    )


def test_table_has_a_padding_row_that_is_never_handed_out() -> None:
    pool = ReqToTokenPool(size=3, max_context_len=16)
    assert pool.req_to_token.shape == (4, 16)
    assert pool.req_to_token.dtype == np.int32
    rows = [pool.alloc() for _ in range(4)]
    assert sorted(row for row in rows if row is not None) == [1, 2, 3]
    assert rows[3] is None


@pytest.mark.parametrize(("size", "length"), [(0, 8), (8, 0), (-1, 8)])
def test_impossible_sizes_are_refused(size: int, length: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ReqToTokenPool(size, length)
