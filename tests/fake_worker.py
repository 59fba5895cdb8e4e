"""A worker that models KV memory exactly and computes nothing.

Each slot remembers the token written to it. The next token is a hash of the tokens read back
through the row mirror, so a wrong slot, a page freed too early or a stale mirror gives wrong
tokens. `reference` gives what a request must produce.
"""

from __future__ import annotations

import zlib
from collections import deque

import numpy as np

from engine.messages import GenerationBatchResult, ModelWorkerBatch, decode, encode


def next_token(tokens: np.ndarray, vocab: int) -> int:
    """Token that follows `tokens`: any function of the whole sequence does."""
    return zlib.crc32(np.ascontiguousarray(tokens, np.int32).tobytes()) % vocab


def reference(
    prompt: list[int], max_new: int, vocab: int, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """Output of a request run alone."""
    tokens = list(prompt)
    out: list[int] = []
    while len(out) < max_new:
        token = next_token(np.asarray(tokens, np.int32), vocab)
        out.append(token)
        tokens.append(token)
        if token in stop_ids:
            break
    return out


class FakeWorker:
    """Runs steps in order; `launch` encodes and decodes the message as the wire would."""

    def __init__(self, num_slots: int, max_rows: int, max_len: int, vocab: int) -> None:
        self.memory = np.full(num_slots, -7, np.int64)
        self.mirror = np.zeros((max_rows + 1, max_len), np.int64)
        self.future = np.full(max_rows + 1, -7, np.int64)
        self.vocab = vocab
        self.pending: deque[ModelWorkerBatch] = deque()
        self.steps_seen = 0
        self.prompt_tokens_run = 0

    def launch(self, batch: ModelWorkerBatch) -> None:
        self.pending.append(decode([bytes(f) for f in encode(batch)], ModelWorkerBatch))

    def run(self) -> GenerationBatchResult:
        """Execute the oldest launched step."""
        b = self.pending.popleft()
        assert b.step > self.steps_seen, "steps out of order"
        self.steps_seen = b.step
        at = 0
        for row, n in zip(b.prefix_rows.tolist(), b.prefix_lens.tolist(), strict=True):
            self.mirror[row, :n] = b.prefix_locs[at : at + n]
            at += n
        lens = b.extend_lens.tolist() + [1] * (len(b.req_pool_indices) - b.num_extend)
        assert sum(lens) == len(b.input_ids) == len(b.out_cache_loc)
        assert len(set(b.out_cache_loc.tolist())) == len(b.out_cache_loc), "slot written twice"
        at = 0
        for i, (row, n, end) in enumerate(
            zip(b.req_pool_indices.tolist(), lens, b.seq_lens.tolist(), strict=True)
        ):
            ids = b.input_ids[at : at + n].astype(np.int64)
            if i >= b.num_extend and ids[0] == -1:
                ids = self.future[row : row + 1].copy()
            assert (ids >= 0).all(), "placeholder reached the model"
            locs = b.out_cache_loc[at : at + n]
            self.memory[locs] = ids
            self.mirror[row, end - n : end] = locs
            if i < b.num_extend:
                self.prompt_tokens_run += n
            at += n
        tokens = []
        for i in b.sample_rows.tolist():
            row, end = int(b.req_pool_indices[i]), int(b.seq_lens[i])
            token = next_token(self.memory[self.mirror[row, :end]], self.vocab)
            self.future[row] = token
            tokens.append(token)
        return GenerationBatchResult(b.step, np.asarray(tokens, np.int32))
