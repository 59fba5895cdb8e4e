"""Adapters in the scheduler: slots, turns, loads; whatever comes and goes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.adapters import AdapterLoaded, AdapterRef, LoadAdapter
from engine.protocol.messages import AbortRequest
from engine.protocol.sequence import KeyLimits
from engine.protocol.step import ModelWorkerBatch
from engine.scheduler.adapters import LONG_TURN, SHORT_TURN
from tests.support.scheduler_harness import MODE_IDS, MODES, Harness, prompt


def ref(number: int) -> AdapterRef:
    return AdapterRef(f"a{number}", f"digest{number}", f"/adapters/{number}")


class AdapterHarness(Harness):
    """Workers that read adapters after a while, and check that each step has the right ones."""

    def __init__(self, *, delay: int = 0, broken: frozenset[str] = frozenset(), **more: Any):
        super().__init__(lora_folder="somewhere", **more)
        self.delay, self.broken = delay, broken
        self.held: set[str] = set()
        self.slots: dict[int, str] = {}
        self.loading: list[tuple[int, str]] = []
        self.loads: list[str] = []
        self.turn = 0
        self.most_held = 0
        launch = self.worker.launch

        def checked(batch: ModelWorkerBatch) -> None:
            self.check_batch(batch)
            launch(batch)

        self.worker.launch = checked  # type: ignore[method-assign]

    def check_batch(self, batch: ModelWorkerBatch) -> None:
        for item in batch.adapter_slots or ():
            assert item.digest in self.held, "a slot gets an adapter that isn't there"
            self.slots[item.slot] = item.digest
        assert all(slot < self.config.engine.max_loras for slot in self.slots)
        by_row = {r.req_pool_idx: r for r in self.scheduler.requests.by_key.values()}
        for line, row in enumerate(batch.req_pool_indices.tolist()):
            adapter = by_row[row].sequence.adapter
            slot = -1 if batch.adapters is None else int(batch.adapters[line])
            found = self.slots[slot] if slot >= 0 else None
            assert found == (None if adapter is None else adapter.digest)

    def launch(self) -> bool:
        self.turn += 1
        for due, digest in list(self.loading):
            if due <= self.turn:
                self.loading.remove((due, digest))
                error = "it is broken" if digest in self.broken else ""
                if not error:
                    self.held.add(digest)
                self.scheduler.adapter_loaded(AdapterLoaded(0, digest, error))
        launched = super().launch()
        for order in self.scheduler.take_orders():
            if isinstance(order, LoadAdapter):
                assert order.adapter.digest not in self.held
                self.loads.append(order.adapter.digest)
                self.loading.append((self.turn + self.delay, order.adapter.digest))
            else:
                self.held.discard(order.digest)
        self.most_held = max(self.most_held, len(self.held) + len(self.loading))
        return launched


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_whatever_comes(mode: dict[str, Any], seed: int) -> None:
    """Requests of more adapters than slots and memory come, go and are retracted: each step has the
    adapters of its lines, and all requests end."""
    rng = random.Random(seed)
    harness = AdapterHarness(
        delay=rng.randrange(4),
        broken=frozenset({"digest9"}),
        max_loras=rng.randrange(1, 4),
        max_cpu_loras=rng.randrange(3, 6),
        num_kv_tokens=rng.choice([128, 256]),
        schedule_policy=rng.choice(["lpm", "fcfs", "priority"]),
        enable_priority_preemption=False,
        **mode,
    )
    shared = prompt(rng, 12)
    for rid in range(rng.randrange(5, 40)):
        number = rng.choice([None, 0, 0, 0, 1, 2, 3, 4, 5, 6, 9])
        tokens = shared[: rng.randrange(12)] + prompt(rng, rng.randrange(1, 20))
        adapter = None if number is None else ref(number)
        harness.add(rid, tokens, rng.randrange(1, 12), adapter=adapter)
        for _ in range(rng.randrange(3)):
            harness.step()
            harness.check()
        running = [r for m in harness.scheduler.micro_batches for r in m.running.reqs]
        if running and rng.random() < 0.2:
            harness.scheduler.requests.retract(rng.choice(running))
        if rng.random() < 0.1:
            victim = ("c", rng.randrange(rid + 1))
            if victim not in harness.finished:
                harness.aborted.add(victim)
                harness.scheduler.abort(AbortRequest(rid=victim[1], reply_to="c"))
    harness.run()
    failed = {key for key, end in harness.finished.items() if end.reason == "error"}
    for key in failed:
        assert harness.finished[key].message == "it is broken"
        assert harness.finished[key].status == 400
    assert harness.most_held <= harness.config.engine.max_held_loras
    assert harness.scheduler.adapters is not None
    assert harness.scheduler.adapters.is_empty


def test_no_adapter_waits_for_ever() -> None:
    """Two adapters have all slots and get new requests all the time; a third one gets its turn."""
    harness = AdapterHarness(max_loras=2, lookahead=2, max_running_requests=32)
    rid = 0
    for _ in range(4):
        for number in (0, 1):
            harness.add(rid, [1, 2, 3], 8, adapter=ref(number))
            rid += 1
    for _ in range(3):
        harness.step()
    harness.add(1000, [4, 5, 6], 4, adapter=ref(2))
    for _ in range(60):
        for number in (0, 1):
            harness.add(rid, [1, 2, 3], 8, adapter=ref(number))
            rid += 1
        harness.step()
        if ("c", 1000) in harness.finished:
            break
    else:
        pytest.fail("the third adapter waits for ever")


def test_those_behind_go_on() -> None:
    """A request whose adapter has no slot holds up neither the model's own nor a running one's."""
    harness = AdapterHarness(max_loras=1, schedule_policy="fcfs")
    harness.add(0, [1, 2, 3], 40, adapter=ref(0))
    harness.add(1, [1, 2, 4], 40, adapter=ref(1))
    harness.add(2, [1, 2, 5], 4)
    for _ in range(12):
        harness.step()
    assert ("c", 2) in harness.finished
    harness.run()
    assert ("c", 1) in harness.finished


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("cached", [True, False])
def test_a_long_answer_gives_its_slot_to_a_new_request(mode: dict[str, Any], cached: bool) -> None:
    """It goes on afterwards. Where nothing is kept of it, its next turn is longer."""
    harness = AdapterHarness(
        max_loras=1, enable_prefix_cache=cached, num_kv_tokens=512, max_model_len=400, **mode
    )
    harness.add(0, [1, 2, 3], 200, adapter=ref(0))
    for _ in range(12):
        harness.step()
    harness.add(1, [1, 2, 4], 4, adapter=ref(1))
    steps = 0
    while not harness.tokens["c", 1]:
        harness.step()
        harness.check()
        steps += 1
    assert steps < 16
    assert ("c", 0) not in harness.finished
    harness.run()
    assert 1 <= harness.scheduler.snapshot_stats().adapter_displacements_total <= 5


def test_long_answers_take_turns() -> None:
    """Five that are all at work share two slots evenly, and change for every long turn only."""
    harness = AdapterHarness(max_loras=2, num_kv_tokens=4096, max_model_len=400)
    for number in range(5):
        harness.add(number, [1, 2, 3], 300, adapter=ref(number))
    while not harness.finished:
        harness.step()
    got = [len(harness.tokens["c", number]) for number in range(5)]
    assert max(got) - min(got) <= 4 * LONG_TURN
    harness.run()
    found = harness.scheduler.snapshot_stats().adapter_displacements_total
    assert 8 <= found <= 1500 // LONG_TURN + 5  # at the beginning all are new


def test_adapters_beyond_memory_take_turns() -> None:
    """Two have work all the time, and there is room for one."""
    harness = AdapterHarness(
        max_loras=1, max_cpu_loras=1, delay=2, max_model_len=400, num_kv_tokens=1024
    )
    for number in range(3):
        harness.add(number, [1, 2, 3], 100, adapter=ref(number))
    started: set[int] = set()
    for _ in range(200):
        harness.step()
        harness.check()
        started |= {rid for (_, rid), tokens in harness.tokens.items() if tokens}
        if len(started) == 3:
            break
    assert len(started) == 3 and not harness.finished
    harness.run()
    assert len(harness.loads) > 3 and harness.most_held == 1


def test_a_key_at_its_limit_keeps_no_slot() -> None:
    """Its requests wait for the key's own, with adapters or not; other keys' adapters run."""
    harness = AdapterHarness(max_loras=2, max_cpu_loras=8, max_model_len=400, num_kv_tokens=1024)
    limited = KeyLimits("limited", max_running=1)
    harness.add(0, [1, 2, 3], 300, key=limited)
    for _ in range(3):
        harness.step()
    for number in range(2):
        harness.add(1 + number, [1, 2, 3], 4, adapter=ref(number), key=limited)
    for _ in range(3):
        harness.step()
    for number in range(2, 5):
        harness.add(1 + number, [1, 2, 3], 4, adapter=ref(number), key=KeyLimits("other"))
    for _ in range(40):
        harness.step()
    assert {("c", 3), ("c", 4), ("c", 5)} <= harness.finished.keys()
    assert ("c", 0) not in harness.finished
    harness.run()


def test_a_long_prompt_is_computed_in_one_turn() -> None:
    """Though its adapter's other request has had its token, and another adapter always has work."""
    harness = AdapterHarness(max_loras=1, max_model_len=400, num_kv_tokens=2048, max_cpu_loras=4)
    harness.add(0, [1, 2, 3], 300, adapter=ref(0))
    harness.add(1, list(range(1, 41)) * 4, 2, adapter=ref(0))
    rid = 2
    for _ in range(80):
        harness.add(rid, [4, 5, 6], 2, adapter=ref(1))
        rid += 1
        harness.step()
        if ("c", 1) in harness.finished:
            break
    else:
        pytest.fail("the prompt is begun for ever")


def test_embeddings_take_turns() -> None:
    """They give no tokens, so a turn is so many requests."""
    harness = AdapterHarness(max_loras=1, max_running_requests=2)
    rid = 0
    for _ in range(6):
        harness.embed(rid, [1, 2, 3], adapter=ref(0))
        rid += 1
    harness.add(1000, [4, 5, 6], 4, adapter=ref(1))
    for _ in range(40):
        harness.embed(rid, [1, 2, 3], adapter=ref(0))
        rid += 1
        harness.step()
        if ("c", 1000) in harness.finished:
            break
    else:
        pytest.fail("the second adapter waits for ever")


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_how_long_a_first_token_takes(mode: dict[str, Any], seed: int) -> None:
    """However many adapters are asked for and however long the answers: those before a request in
    the queue have a short turn each."""
    rng = random.Random(seed)
    slots, adapters = rng.randrange(1, 4), rng.randrange(2, 8)
    rows = dict(num_kv_tokens=4096, max_running_requests=64, chunked_prefill_size=512)
    if "pp_size" in mode:
        rows["max_micro_batch_size"] = 64
    keys = {**mode, **rows, "schedule_policy": "fcfs"}
    harness = AdapterHarness(max_loras=slots, max_cpu_loras=8, **keys)
    came: dict[int, int] = {}
    longest, step, rid = 0, 0, 0
    while step < 150:
        if rng.random() < 0.3 and rid < 30:
            harness.add(
                rid, prompt(rng, 5), rng.randrange(1, 60), adapter=ref(rng.randrange(adapters))
            )
            came[rid] = step
            rid += 1
        harness.step()
        step += 1
        started = [key[1] for key, tokens in harness.tokens.items() if tokens]
        for one in started:
            if one in came:
                longest = max(longest, step - came.pop(one))
    # A turn is a prefill, its tokens, and the steps in flight when it ends.
    turn = (SHORT_TURN + 6) * mode.get("num_micro_batches", 1)
    assert longest <= turn * (adapters // slots + 2)
    harness.run()


def test_reading_runs_beside_steps() -> None:
    harness = AdapterHarness(delay=30)
    harness.add(0, [1, 2, 3], 4, adapter=ref(0))
    harness.add(1, [1, 2, 3], 8)
    for _ in range(12):
        harness.step()
    assert ("c", 1) in harness.finished
    assert ("c", 0) not in harness.finished
    harness.run()


def test_a_prefix_is_one_adapters() -> None:
    """Equal prompts with other adapters share nothing; with another version of it neither."""
    harness = AdapterHarness(max_loras=4)
    tokens = list(range(1, 17))
    new = AdapterRef("a0", "digest0b", "/adapters/0")
    for rid, adapter in enumerate([None, ref(0), ref(1), new, ref(0), None]):
        harness.add(rid, tokens, 3, adapter=adapter)
        harness.run()
    assert [harness.cached["c", rid] for rid in range(6)] == [0, 0, 0, 0, 12, 12]


def test_a_broken_adapter_is_tried_again() -> None:
    harness = AdapterHarness(broken=frozenset({"digest9"}))
    for rid in range(2):
        harness.add(rid, [1, 2, 3], 4, adapter=ref(9))
        harness.run()
        assert harness.finished["c", rid].status == 400
    assert harness.loads == ["digest9"] * 2


def test_the_least_recently_used_leaves_memory() -> None:
    harness = AdapterHarness(max_loras=1, max_cpu_loras=2)
    for rid, number in enumerate([0, 1, 0, 2, 0, 1]):
        harness.add(rid, [1, 2, 3], 4, adapter=ref(number))
        harness.run()
    assert harness.loads == ["digest0", "digest1", "digest2", "digest1"]
