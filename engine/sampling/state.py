"""Sampling state of all slots of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import to_device
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import SlotParams
from engine.sampling.hash_noise import mix_seed
from engine.sampling.logprobs import ListedTokens
from engine.sampling.penalties import PenaltyPool
from engine.sampling.plan import (
    BannedTokens,
    Draw,
    LogprobGroup,
    PenaltyGroup,
    SamplingPlan,
    SparseBias,
    row_group,
)

# vLLM's limit: below it logits / temperature leaves float32's range.
MIN_TEMPERATURE = 1e-5
_NO_TOP_P = 2.0
_MAX_PLANS = 32


class RowParams(NamedTuple):
    """Parameters of a batch's rows, each [S, 1] on the device."""

    inverse_temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor


class SamplingState:
    """Sampling parameters by slot, as tensors on the device. The host knows what each slot uses.

    A slot that was never installed is greedy. Slots are installed when a request takes them and
    again when it comes back after a retraction or a resume; everything else that sampling depends
    on is a function of the tokens, so nothing has to be saved in between.
    """

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.penalty_pool = PenaltyPool(vocab_size, self.device)
        # engine/csrc/sampling.h reads these two tables too, by `tables`.
        # Columns: 1/temperature, top_p, min_p, repetition, presence, frequency.
        self._floats = torch.zeros((max_slots, 6), dtype=torch.float32, device=self.device)
        # Columns: hashed seed, top_k (1: greedy), first position at which min_tokens are reached.
        self._ints = torch.zeros((max_slots, 3), dtype=torch.int64, device=self.device)
        self._draw = np.zeros(max_slots, dtype=np.int8)
        self._top_k = np.zeros(max_slots, dtype=np.int64)
        self._min_p = np.zeros(max_slots, dtype=np.bool_)
        self._penalties = np.zeros((max_slots, 3), dtype=np.bool_)
        self._num_top = np.full(max_slots, -1, dtype=np.int64)
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._banned: dict[int, np.ndarray] = {}
        self._listed: dict[int, list[int]] = {}
        self._plans: dict[bytes, SamplingPlan] = {}

    @torch.inference_mode()
    def install(self, slots: Sequence[SlotParams]) -> None:
        """Set the state of `slots`; of a slot named twice the last entry counts.

        Raises `ValueError` if a slot samples without a seed (admission draws one) or uses penalties
        and came without its tokens; then no slot has changed.
        """
        latest = list({item.slot: item for item in slots}.values())
        if not latest:
            return
        floats = np.array([_float_row(item.params) for item in latest], dtype=np.float32)
        ints = np.array([_int_row(item, self.vocab_size) for item in latest], dtype=np.int64)
        penalised = [item for item in latest if item.params.has_penalties]
        for item in penalised:
            self.penalty_pool.check(item)
        index = to_device(np.array([item.slot for item in latest], dtype=np.int64), self.device)
        self._floats.index_copy_(0, index, to_device(floats, self.device))
        self._ints.index_copy_(0, index, to_device(ints, self.device))
        for item in latest:
            self._install_on_host(item)
        if penalised:
            self.penalty_pool.install(penalised)
        self._plans.clear()

    def plan(self, slots: np.ndarray) -> SamplingPlan:
        """Row groups of the batch with `slots` int [S]; kept until the next install."""
        slots = slots.astype(np.int64, copy=False)
        key = slots.tobytes()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._build_plan(slots)
        return plan

    def row_params(self, slots: Tensor) -> RowParams:
        """Parameters of the rows with `slots` int64 [S]."""
        floats = self._floats.index_select(0, slots)
        top_k = self._ints[:, 1].index_select(0, slots).unsqueeze(1)
        return RowParams(floats[:, 0:1], floats[:, 1:2], floats[:, 2:3], top_k)

    def tables(self) -> tuple[Tensor, Tensor]:
        """All slots' parameters, which installs change in place: float32 [slots, ...] with columns
        1/temperature, top_p and min_p, int64 [slots, ...] with columns hashed seed and top_k."""
        return self._floats, self._ints

    def mixed_seeds(self, slots: Tensor) -> Tensor:
        """int64 [S], the first argument of `HashNoise.row_keys`."""
        return self._ints[:, 0].index_select(0, slots)

    def greedy(self, slots: Tensor) -> Tensor:
        """bool [S]: whether a row takes the likeliest token (slots that were installed)."""
        return self._ints[:, 1].index_select(0, slots) == 1

    def penalty_factors(self, slots: Tensor) -> Tensor:
        """float32 [S, 3]: repetition, presence, frequency."""
        return self._floats[:, 3:6].index_select(0, slots)

    def min_lens(self, slots: Tensor) -> Tensor:
        """int64 [S]: the number of tokens (prompt and output) at which a row may end."""
        return self._ints[:, 2].index_select(0, slots)

    def _install_on_host(self, item: SlotParams) -> None:
        slot, params = item.slot, item.params
        self.penalty_pool.free(slot)
        self._bias.pop(slot, None)
        self._banned.pop(slot, None)
        self._listed.pop(slot, None)
        draw = _draw_of(params, self.vocab_size)
        self._draw[slot] = draw
        self._top_k[slot] = params.top_k if draw is Draw.TOP_K else 0
        self._min_p[slot] = params.min_p > 0.0
        self._penalties[slot] = (
            params.repetition_penalty != 1.0,
            params.presence_penalty != 0.0,
            params.frequency_penalty != 0.0,
        )
        self._num_top[slot] = -1 if params.logprobs is None else params.logprobs
        if params.logprob_token_ids:
            self._listed[slot] = params.logprob_token_ids
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
            values = np.fromiter(params.logit_bias.values(), dtype=np.float32)
            self._bias[slot] = (ids, values)
        if params.min_tokens > 0:
            banned = sorted({*item.eos_token_ids, *params.stop_token_ids})
            if banned:
                self._banned[slot] = np.array(banned, dtype=np.int64)

    def _build_plan(self, slots: np.ndarray) -> SamplingPlan:
        draw = self._draw[slots]
        groups = {kind: row_group(draw == kind, self.device) for kind in Draw}
        return SamplingPlan(
            draws={kind: group for kind, group in groups.items() if group is not None},
            uses_min_p=bool(self._min_p[slots].any()),
            max_top_k=int(self._top_k[slots].max(initial=0)),
            penalties=self._plan_penalties(slots),
            bias=self._plan_bias(slots),
            banned=self._plan_banned(slots),
            logprobs=self._plan_logprobs(slots),
        )

    def _plan_penalties(self, slots: np.ndarray) -> PenaltyGroup | None:
        uses = self._penalties[slots]
        chosen = uses.any(axis=1)
        rows = row_group(chosen, self.device)
        if rows is None:
            return None
        pool_rows = [self.penalty_pool.row(int(slot)) for slot in slots[chosen]]
        repetition, presence, frequency = (bool(used) for used in uses.any(axis=0))
        return PenaltyGroup(
            rows,
            to_device(np.array(pool_rows, dtype=np.int64), self.device),
            repetition,
            presence,
            frequency,
        )

    def _plan_bias(self, slots: np.ndarray) -> SparseBias | None:
        found = [
            (row * self.vocab_size + self._bias[slot][0], self._bias[slot][1])
            for row, slot in enumerate(slots.tolist())
            if slot in self._bias
        ]
        if not found:
            return None
        index = np.concatenate([ids for ids, _ in found])
        values = np.concatenate([biases for _, biases in found])
        return SparseBias(to_device(index, self.device), to_device(values, self.device))

    def _plan_banned(self, slots: np.ndarray) -> BannedTokens | None:
        found = [
            (row, self._banned[slot])
            for row, slot in enumerate(slots.tolist())
            if slot in self._banned
        ]
        if not found:
            return None
        rows = np.repeat([row for row, _ in found], [len(ids) for _, ids in found])
        index = rows * self.vocab_size + np.concatenate([ids for _, ids in found])
        return BannedTokens(to_device(index, self.device), to_device(rows, self.device))

    def _plan_logprobs(self, slots: np.ndarray) -> LogprobGroup | None:
        num_top = self._num_top[slots]
        chosen = num_top >= 0
        rows = row_group(chosen, self.device)
        if rows is None:
            return None
        listed = self._plan_listed(slots[chosen], num_top[chosen])
        return LogprobGroup(rows, num_top[chosen], np.flatnonzero(chosen), listed)

    def _plan_listed(self, slots: np.ndarray, num_top: np.ndarray) -> ListedTokens | None:
        lists = [self._listed.get(slot, []) for slot in slots.tolist()]
        counts = [len(ids) for ids in lists]
        if not any(counts):
            return None
        most = max(counts)
        padded = np.zeros((len(lists), most), dtype=np.int64)
        order = np.zeros((len(lists), int((num_top + counts).max())), dtype=np.int64)
        for row, (ids, top) in enumerate(zip(lists, num_top.tolist(), strict=True)):
            padded[row, : len(ids)] = ids
            order[row, : len(ids) + top] = [*range(len(ids)), *range(most, most + top)]
        return ListedTokens(to_device(padded, self.device), to_device(order, self.device), counts)


def _draw_of(params: SamplingParams, vocab_size: int) -> Draw:
    if params.temperature < MIN_TEMPERATURE or params.top_k == 1:
        return Draw.GREEDY
    if 0 < params.top_k < vocab_size:
        return Draw.TOP_K
    return Draw.NUCLEUS if params.top_p < 1.0 else Draw.FULL


def _float_row(params: SamplingParams) -> tuple[float, ...]:
    return (
        1.0 / max(params.temperature, MIN_TEMPERATURE),
        # 1 must not drop the tail whose mass is lost in rounding.
        params.top_p if params.top_p < 1.0 else _NO_TOP_P,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def _int_row(item: SlotParams, vocab_size: int) -> tuple[int, ...]:
    params = item.params
    seed = params.seed
    if seed is None:
        if params.temperature >= MIN_TEMPERATURE:
            raise ValueError(f"slot {item.slot} samples without a seed")
        seed = 0
    top_k = params.top_k if params.top_k > 0 else 2**31 - 1
    if _draw_of(params, vocab_size) is Draw.GREEDY:
        top_k = 1
    return (mix_seed(seed), top_k, item.prompt_len + params.min_tokens)
