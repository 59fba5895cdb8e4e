"""A worker that models KV memory exactly and computes nothing.

Each slot remembers the token written to it. The next token is a hash of the tokens read back
through the row mirror, so a wrong slot, a page freed too early or a stale mirror gives wrong
tokens. So does each place in layers with windows, where every query must find the tokens that it
sees. `reference` gives what a request must produce.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection

import numpy as np

from engine.memory_need import WindowNeed
from engine.protocol.encoding import decode, encode
from engine.protocol.pooling import Pooling
from engine.protocol.step import GenerationBatchResult, ModelWorkerBatch, PooledLines, SampleMasks
from engine.speculative.step_filler import StepFiller


def next_token(tokens: np.ndarray, vocab: int) -> int:
    """Token that follows `tokens`: any function of the whole sequence does."""
    return zlib.crc32(np.ascontiguousarray(tokens, np.int32).tobytes()) % vocab


def next_allowed(tokens: np.ndarray, allowed: Collection[int]) -> int:
    """The same for a constrained request, which may only go on with `allowed` tokens."""
    return sorted(allowed)[next_token(tokens, len(allowed))]


def allowed_tokens(
    out: list[int], choices: list[list[int]], eos_token_ids: Collection[int]
) -> set[int]:
    """Tokens that may follow `out` if the output must be one of `choices`; all are tried."""
    allowed = {c[len(out)] for c in choices if len(c) > len(out) and c[: len(out)] == out}
    return allowed | set(eos_token_ids) if out in choices else allowed


def reference(
    prompt: list[int],
    max_new: int,
    vocab: int,
    stop_ids: frozenset[int] = frozenset(),
    choices: list[list[int]] | None = None,
    eos_token_ids: Collection[int] = (),
) -> list[int]:
    """Output of a request run alone; with `choices`, one of them and then an eos token."""
    tokens = list(prompt)
    out: list[int] = []
    while len(out) < max_new:
        so_far = np.asarray(tokens, np.int32)
        if choices is None:
            token = next_token(so_far, vocab)
        else:
            allowed = allowed_tokens(out, choices, eos_token_ids)
            if not allowed:
                break
            token = next_allowed(so_far, allowed)
        out.append(token)
        tokens.append(token)
        if token in stop_ids:
            break
    return out


def reference_embedding(prompt: list[int], pooling: Pooling) -> bytes:
    """Embedding of a request run alone; that of a mean depends on every token alike."""
    tokens = np.asarray(prompt, np.int64)
    return _last(tokens) if pooling == "last" else _mean(int(tokens.sum()), len(prompt))


def _last(tokens: np.ndarray) -> bytes:
    return np.array([next_token(tokens, 2**20), len(tokens)], "<f4").tobytes()


def _mean(total: int, count: int) -> bytes:
    return np.array([total, count], "<f4").tobytes()


class FakeWorker:
    """Runs steps in order; `launch` encodes and decodes the message as the wire would."""

    def __init__(
        self,
        num_slots: int,
        max_rows: int,
        max_len: int,
        vocab: int,
        filler: StepFiller | None = None,
        windows: WindowNeed | None = None,
    ) -> None:
        """`filler`: as a worker of an engine that speculates has it. `windows`: if layers with
        windows have fewer places than slots."""
        self.windows = windows
        if windows is not None:
            self.page_size = windows.page_size
            places = windows.tokens(num_slots - self.page_size) + self.page_size
            self.near_memory = np.full(places, -7, np.int64)
            self.near_mirror = np.zeros((max_rows + 1, max_len), np.int64)
            self.window_page = np.zeros(num_slots // self.page_size, np.int64)
        self.filler = filler
        self.drafts_checked = 0
        self.memory = np.full(num_slots, -7, np.int64)
        self.mirror = np.zeros((max_rows + 1, max_len), np.int64)
        self.future = np.full(max_rows + 1, -7, np.int64)
        self.vocab = vocab
        self.pending: deque[ModelWorkerBatch] = deque()
        self.masks: dict[int, SampleMasks] = {}
        """Masks by step, of delayed samples that haven't run."""
        self.masks_seen: set[int] = set()
        self.steps_seen = 0
        self.prompt_tokens_run = 0
        self.open: set[int] = set()
        """Rows whose prompt isn't complete."""
        self.running_sum = (0, 0, 0)
        """Row, tokens so far and their sum, of the mean that is between two chunks."""
        self.is_failing = False
        """Embeddings come out as NaN."""

    def launch(self, batch: ModelWorkerBatch) -> None:
        self.pending.append(decode([bytes(f) for f in encode(batch)], ModelWorkerBatch))

    def sample(self, masks: SampleMasks) -> None:
        """Take the masks of a delayed step."""
        delayed = {b.step for b in self.pending if b.delayed_sample}
        assert masks.step in delayed, "masks of a step that isn't delayed or wasn't launched"
        assert masks.step not in self.masks_seen, "masks sent twice"
        self.masks_seen.add(masks.step)
        self.masks[masks.step] = decode([bytes(f) for f in encode(masks)], SampleMasks)

    def run(self) -> GenerationBatchResult:
        """Execute the oldest launched step. Its masks must have come before."""
        b = self.pending.popleft()
        self.open.update(item.row for item in b.new_rows)
        if self.filler is not None:
            self.filler.install(b.new_rows)
            b = self.filler.fill(b)
        assert not b.delayed_sample or b.step in self.masks, "no masks: a worker waits for ever"
        allowed = _unpack(self.masks.pop(b.step)) if b.delayed_sample else {}
        assert b.step > self.steps_seen, "steps out of order"
        self.steps_seen = b.step
        assert self.windows is not None or b.window_pages is None
        if b.window_pages is not None:
            self.window_page[b.window_pages[0]] = b.window_pages[1]
        at = 0
        for row, n in zip(b.prefix_rows.tolist(), b.prefix_lens.tolist(), strict=True):
            locs = b.prefix_locs[at : at + n]
            self.mirror[row, :n] = locs
            if self.windows is not None:
                self.near_mirror[row, :n] = self._near(locs)
            at += n
        lens = b.query_lens.tolist()
        assert sum(lens) == len(b.input_ids) == len(b.out_cache_loc)
        assert len(set(b.out_cache_loc.tolist())) == len(b.out_cache_loc), "slot written twice"
        at = 0
        for i, (row, n, end) in enumerate(
            zip(b.req_pool_indices.tolist(), lens, b.seq_lens.tolist(), strict=True)
        ):
            ids = b.input_ids[at : at + n].astype(np.int64)
            if n == 1 and ids[0] == -1:
                ids = self.future[row : row + 1].copy()
            assert (ids >= 0).all(), "placeholder reached the model"
            locs = b.out_cache_loc[at : at + n]
            self.memory[locs] = ids
            self.mirror[row, end - n : end] = locs
            if self.windows is not None:
                assert (self._near(locs) >= self.page_size).all(), "no place in a window"
                self.near_memory[self._near(locs)] = ids
                self.near_mirror[row, end - n : end] = self._near(locs)
            if row in self.open:
                self.prompt_tokens_run += n
                if b.num_sampled[i]:
                    self.open.discard(row)
            at += n
        if self.windows is not None:
            self._check_windows(b, self.windows.reach)
        runs: list[list[int]] = []
        errors = {}
        for number, i in enumerate(b.sampled_lines.tolist()):
            row, end = int(b.req_pool_indices[i]), int(b.seq_lens[i])
            drafts = int(b.num_sampled[i]) - 1
            masks = allowed.get(number, [])
            assert not masks or len(masks) == 1 + drafts, "other masks than drafts"
            read = self.memory[self.mirror[row, :end]]
            run: list[int] = []
            for known in range(end - drafts, end + 1):
                token = next_token(read[:known], self.vocab)
                if masks:
                    if of_place := masks[known - end + drafts]:
                        token = next_allowed(read[:known], of_place)
                    else:
                        errors[number] = "no token is allowed"
                run.append(int(token))
                if known < end and read[known] != token:
                    break
            self.future[row] = run[-1]
            self.drafts_checked += drafts
            runs.append(run)
        embeddings = None if b.pooled is None else self._embeddings(b, b.pooled)
        result = GenerationBatchResult(
            b.step,
            [token for run in runs for token in run],
            line_errors=errors or None,
            embeddings=embeddings,
        )
        if b.checks_drafts:
            result.num_tokens = [len(run) for run in runs]
            result.num_drafts = (b.run_lens - 1).tolist()
        if self.filler is not None:
            self.filler.record(b, self.filler.owners(b), runs)
            if b.drafts_wanted:
                slots = b.req_pool_indices[b.sampled_lines].tolist()
                result.drafts = self.filler.propose(slots, [b.drafts_wanted] * len(slots))
        return result

    def _near(self, locs: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.window_page[locs // self.page_size] * self.page_size
        return found + locs % self.page_size

    def _check_windows(self, b: ModelWorkerBatch, reach: int) -> None:
        """Every query of the step finds the tokens that it sees."""
        lines = zip(
            b.req_pool_indices.tolist(), b.query_lens.tolist(), b.seq_lens.tolist(), strict=True
        )
        for row, n, end in lines:
            seen = slice(max(end - n + 1 - reach, 0), end)
            found = self.near_memory[self.near_mirror[row, seen]]
            wanted = self.memory[self.mirror[row, seen]]
            assert np.array_equal(found, wanted), "a window holds other tokens"

    def _embeddings(self, b: ModelWorkerBatch, pooled: PooledLines) -> list[bytes]:
        sampled = set(b.sampled_lines.tolist())
        assert sampled.isdisjoint((*pooled.last.tolist(), *pooled.mean.tolist()))
        ends = np.cumsum(b.query_lens).tolist()
        found = []
        for i in pooled.last.tolist():
            found.append(_last(self.memory[self.mirror[b.req_pool_indices[i], : b.seq_lens[i]]]))
        for i in pooled.mean.tolist():
            row, count, n = int(b.req_pool_indices[i]), int(b.seq_lens[i]), int(b.query_lens[i])
            total = int(b.input_ids[ends[i] - n : ends[i]].sum())
            if count > n:
                assert self.running_sum[:2] == (row, count - n), "a chunk of a mean is missing"
                total += self.running_sum[2]
            if i in pooled.mean_ends.tolist():
                found.append(_mean(total, count))
            else:
                self.running_sum = (row, count, total)
        return [b""] * len(found) if self.is_failing else found


def _unpack(masks: SampleMasks) -> dict[int, list[list[int]]]:
    """By sampled row: the tokens allowed at each of its places."""
    found: dict[int, list[list[int]]] = {}
    bits = np.unpackbits(masks.masks.view(np.uint8), axis=1, bitorder="little")
    for row, allowed in zip(masks.lines.tolist(), bits, strict=True):
        found.setdefault(row, []).append(np.flatnonzero(allowed).tolist())
    return found
