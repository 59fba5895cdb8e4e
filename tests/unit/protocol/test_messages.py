"""Messages survive the wire; strangers and garbage don't get in."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import encoding
from engine.protocol.messages import AddRequest, StepOutputs
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import (
    GenerationBatchResult,
    ModelWorkerBatch,
    PooledLines,
    RowParams,
)
from engine.protocol.tokenizer_messages import TextDelta, TextOutputs
from tests.support.requests import add_request

ints = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3000).map(
    lambda v: np.asarray(v, np.int32)
)


def wire(frames: list[bytes | memoryview]) -> list[bytes]:
    return [bytes(f) for f in frames]


@given(ids=ints, out=st.none() | ints, seed=st.none() | st.integers(-(2**63), 2**63 - 1))
def test_add_request_round_trip(ids: np.ndarray, out: np.ndarray | None, seed: int | None) -> None:
    sent = add_request(
        rid=2**40,
        input_ids=ids,
        output_ids=out,
        params=SamplingParams(seed=seed, logit_bias={3: -1.5}, stop=["é\n"]),
    )
    for frames in (wire(encoding.encode(sent)), [encoding.encode_inline(sent)]):
        got = encoding.decode(frames, AddRequest)
        prompt = got.sequence.prompt_ids
        assert np.array_equal(prompt, ids) and prompt.dtype == np.int32
        assert (got.output_ids is None) == (out is None)
        assert got.sequence.params == sent.sequence.params


@given(rows=st.integers(0, 2000))
def test_batch_round_trip(rows: int) -> None:
    a = np.arange(rows, dtype=np.int32)
    empty = np.zeros(0, np.int32)
    slots = [RowParams(1, 2, [3], SamplingParams(top_k=5), a)]
    sent = ModelWorkerBatch(7, 1, a, a + 2, a + 3, a + 1, a - 1, a, empty, empty, empty, slots)
    got = encoding.decode(wire(encoding.encode(sent)), ModelWorkerBatch)
    for name in (
        "req_pool_indices",
        "query_lens",
        "num_sampled",
        "seq_lens",
        "input_ids",
        "out_cache_loc",
    ):
        assert np.array_equal(getattr(got, name), getattr(sent, name)), name
    assert np.array_equal(got.new_rows[0].token_ids, a)


def test_embeddings_round_trip() -> None:
    """Bytes of any length, in every message on their way."""
    vectors = [b"", bytes(range(256)) * 80]
    result = GenerationBatchResult(1, [], embeddings=vectors)
    assert encoding.decode(wire(encoding.encode(result)), GenerationBatchResult) == result
    step = StepOutputs(1, [], [], [], [], embeddings={2**40: vectors[1]})
    assert encoding.decode(wire(encoding.encode(step)), StepOutputs) == step
    delta = TextDelta(1, "", [], 0, "stop", None, 5, 0, embedding=vectors[1])
    outputs = TextOutputs([delta])
    assert encoding.decode(wire(encoding.encode(outputs)), TextOutputs) == outputs
    ids = np.arange(3, dtype=np.int32)
    request = add_request(rid=1, input_ids=ids, params=SamplingParams(), pooling="mean")
    assert encoding.decode([encoding.encode_inline(request)], AddRequest).sequence.pooling == "mean"
    rows = encoding.decode(wire(encoding.encode(PooledLines(ids, ids[:2], ids[:0]))), PooledLines)
    assert [len(found) for found in (rows.last, rows.mean, rows.mean_ends)] == [3, 2, 0]
    sequence = msgspec.structs.replace(request.sequence, pooling="cls")
    wrong = msgspec.structs.replace(request, sequence=sequence)
    with pytest.raises(msgspec.ValidationError):
        encoding.decode([encoding.encode_inline(wrong)], AddRequest)


def test_large_arrays_are_frames_of_their_own() -> None:
    big = np.arange(encoding.INLINE_BYTES, dtype=np.int32)
    frames = encoding.encode(add_request(rid=1, input_ids=big, params=SamplingParams()))
    assert len(frames) == 2 and len(frames[0]) < 200


def test_decode_refuses_what_is_not_the_message() -> None:
    good = wire(encoding.encode(StepOutputs(1, [0, 0], [0, 0], [], [])))
    with pytest.raises(msgspec.MsgspecError):
        encoding.decode(good, AddRequest)
    with pytest.raises(msgspec.MsgspecError):
        encoding.decode([b"\xc1"], StepOutputs)
