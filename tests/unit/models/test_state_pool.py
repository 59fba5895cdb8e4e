"""`StatePool` against a dictionary, and the parts that a step is cut into."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.forward_batch import ForwardBatch
from engine.checkpoint.layout import StateSpec
from engine.models.row_steps import RowSteps
from engine.models.state_pool import StatePool
from engine.protocol.step import ModelWorkerBatch

NUM_ROWS = 7
SPECS = [
    StateSpec(0, 0, "conv", (3, 2), False),
    StateSpec(0, 0, "recurrent", (2,), True),
    StateSpec(2, 1, "recurrent", (), False),
]
CPU = torch.device("cpu")
rows = st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=NUM_ROWS, unique=True)
runs = st.builds(
    lambda start, count: list(range(start, min(start + count, NUM_ROWS))),
    st.integers(0, NUM_ROWS - 1),
    st.integers(1, NUM_ROWS),
)


def test_types_are_those_of_the_specs() -> None:
    pool = StatePool(SPECS, NUM_ROWS, torch.bfloat16, CPU)
    assert [s.dtype for s in pool.take(np.array([4]))] == [
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
    ]
    assert pool.num_bytes == NUM_ROWS * (6 * 2 + 2 * 4 + 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(rows | runs, st.booleans()), max_size=12))
def test_a_row_holds_what_was_put_there_last(steps: list[tuple[list[int], bool]]) -> None:
    pool = StatePool(SPECS, NUM_ROWS, torch.float32, CPU)
    held = [0.0] * NUM_ROWS
    for number, (chosen, in_place) in enumerate(steps, 1):
        index = np.array(chosen)
        taken = pool.take(index)
        for state in taken:
            assert state.reshape(len(chosen), -1)[:, 0].tolist() == [held[row] for row in chosen]
        for place, row in enumerate(chosen):
            held[row] = number * 10.0 + place
        new = torch.tensor([held[row] for row in chosen])
        changed = []
        for state in taken:
            target = state if in_place else torch.empty_like(state)
            changed.append(target.copy_(new.view(-1, *[1] * (state.ndim - 1)).expand_as(state)))
        pool.put(index, changed)
        for state in pool.take(np.arange(NUM_ROWS)):
            assert state.reshape(NUM_ROWS, -1).amin(1).tolist() == held
            assert state.reshape(NUM_ROWS, -1).amax(1).tolist() == held


@dataclass
class Line:
    prefix: int
    length: int

    @property
    def is_decode(self) -> bool:
        return self.length == 1 and self.prefix > 0


lines = st.lists(
    st.builds(Line, st.integers(0, 5), st.integers(1, 1) | st.integers(1, 5)), min_size=1
)


def message(chosen: list[tuple[int, Line]], first_token: int) -> ModelWorkerBatch:
    """A step of lines with their row, whose tokens are numbers from `first_token` on."""
    lens = np.array([line.length for _, line in chosen], np.int32)
    ids = np.arange(first_token, first_token + lens.sum(), dtype=np.int32)
    none = np.zeros(0, np.int32)
    return ModelWorkerBatch(
        0,
        0,
        np.array([row for row, _ in chosen], np.int32),
        lens,
        np.zeros(len(lens), np.int32),
        lens + np.array([line.prefix for _, line in chosen], np.int32),
        ids,
        ids + 1000,
        none,
        none,
        none,
        [],
    )


@settings(max_examples=150, deadline=None)
@given(lines, st.booleans())
def test_parts_are_the_steps_that_they_would_be_alone(
    given_lines: list[Line], continues_chunks: bool
) -> None:
    alone: list[list[tuple[int, Line]]] = []
    for is_decode, group in groupby(enumerate(given_lines, 1), lambda x: x[1].is_decode):
        if is_decode:
            alone.append(list(group))
            continue
        for row, line in group:
            size = 1 if line.prefix and not continues_chunks else line.length
            starts = range(line.prefix, line.prefix + line.length, size)
            alone += [[(row, Line(start, size))] for start in starts]
    steps = RowSteps(None, None, None, continues_chunks)  # type: ignore[arg-type]
    whole = ForwardBatch.from_worker_batch(message(list(enumerate(given_lines, 1)), 0), CPU)
    done = 0
    for part, lines_alone in zip(steps.parts(whole), alone, strict=True):
        expected = ForwardBatch.from_worker_batch(message(lines_alone, done), CPU)
        done += part.num_tokens
        for name in ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens"):
            assert torch.equal(getattr(part, name), getattr(expected, name)), name
        for name in ("req_pool_indices", "seq_lens", "query_lens", "prefix_lens", "token_starts"):
            assert np.array_equal(getattr(part, f"{name}_cpu"), getattr(expected, f"{name}_cpu"))
        if expected.num_long:
            assert part.num_long == 1 and part.num_long_tokens == part.num_tokens
    assert done == whole.num_tokens
