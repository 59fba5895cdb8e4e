"""Resume: whatever is lost under a request, its reader gets what it would have got undisturbed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import RayServeException

from deploy.ingress.attempt import Attempts
from deploy.ingress.resume import AttemptLostError, Loss, Progress, ResumeLimits
from deploy.ingress.tokenizer_link import TokenizerLostError
from engine.errors import EngineDeadError, EngineDrainingError, RequestError
from engine.protocol import encoding
from engine.protocol import tokenizer_messages as tm
from engine.protocol.messages import AbortRequest, AddRequest, FinishedReq, StepOutputs
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.sequence import TokenSequence
from engine.protocol.step import TokenLogprobs
from engine.protocol.tokenizer_messages import TextDelta
from engine.tokenizer import DetokenizerManager, Tokenizer
from tests.support.tiny_tokenizers import write_byte_level

TEXT = (
    "The quick 你好，世界 fox stops naïve 👩‍👩‍👧 dog. def encode(text)\n    return [ord(c) for c "
    "in text] ### User: 100 € déjà vu; café 👍🏽 jumps over stopping STOP </answer> the lazy dog"
)
PROMPT = [0, 5, 6, 7]
DEAD = EngineDeadError("the engine was lost: worker 0 ended")
DRAINING = EngineDrainingError("the engine is being stopped")
UNREACHABLE = ActorUnavailableError("Actor is unavailable.", b"\0" * 16)


@dataclass
class Trouble:
    """What happens to one call: `error` once `after` of its tokens are out, or before it is taken.

    An error of None loses the tokenizer instead.
    """

    after: int = 0
    error: Exception | None = None
    is_taken: bool = True
    busy: bool = False
    swallow: bool = False
    """The text of that token is lost on its way; nothing else happens."""
    hangs: bool = False
    """The call neither goes on nor ends."""


@dataclass
class World:
    """Fake engines that generate TEXT's tokens, and a real detokenizer that can be lost."""

    tokenizer: Tokenizer
    troubles: list[Trouble] = field(default_factory=list)
    limits: ResumeLimits = field(default_factory=ResumeLimits)
    calls: list[AddRequest] = field(default_factory=list)
    registered: list[tm.Register] = field(default_factory=list)
    unregistered: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    resumes: Counter[str] = field(default_factory=Counter)
    knows_replicas: bool = True
    steps_at_once: int = 1
    """Steps whose text is here before the reader looks."""
    generation: int = 0

    def __post_init__(self) -> None:
        self.ids = self.tokenizer.encode(TEXT, add_special_tokens=False)
        self.manager = DetokenizerManager(self.tokenizer)
        self.attempts = Attempts(self, self.handle, self.watch, "ingress")
        self.hung = asyncio.Event()

    # The tokenizer's side

    @property
    def address(self) -> str:
        return f"tokenizer-{self.generation}"

    async def ask_once(self, make: Callable[[int], Any], wait_s: float) -> tm.Registered:
        m = encoding.decode(encoding.encode(make(1)), tm.Register)
        await asyncio.sleep(0)
        self.registered.append(m)
        made = tm.Registered(1, deltas=self.manager.add(m))
        return encoding.decode(encoding.encode(made), tm.Registered)

    def send(self, message: Any) -> None:
        assert isinstance(message, tm.Unregister)
        self.unregistered.append(message.rid)
        self.manager.abort(message.rid)

    def lose_tokenizer(self) -> None:
        self.generation += 1
        self.manager = DetokenizerManager(self.tokenizer)
        self.attempts.fail_all(AttemptLostError(Loss.TOKENIZER, "it died"))

    # The engines' side

    @property
    def handle(self) -> Any:
        return SimpleNamespace(generate=SimpleNamespace(remote=self._remote))

    @property
    def watch(self) -> Any:
        return SimpleNamespace(send=self.abort)

    def _remote(self, request: bytes, ingress: str, actor: str) -> asyncio.Task[None]:
        assert ingress == "ingress"
        return asyncio.get_running_loop().create_task(self.call(request, actor))

    def abort(self, replica: str, request: AbortRequest) -> bool:
        if self.knows_replicas:
            self.aborted.append(request.rid)
        return self.knows_replicas

    async def call(self, encoded: bytes, actor: str) -> None:
        add = encoding.decode([encoded], AddRequest)
        trouble = self.troubles[len(self.calls)] if len(self.calls) < len(self.troubles) else None
        self.calls.append(add)
        try:
            await self._run(add, trouble)
        except asyncio.CancelledError:
            self.cancelled.append(add.rid)
            raise

    async def _run(self, add: AddRequest, trouble: Trouble | None) -> None:
        await asyncio.sleep(0)
        if trouble is not None and not trouble.is_taken:
            if trouble.error is None:
                await self.hung.wait()
            else:
                raise trouble.error
        self.attempts.taken(add.rid, f"replica-{add.rid}")
        if trouble is not None and trouble.busy:
            end = FinishedReq(add.rid, "error", 4, 0, 0, message="the queue is full", status=429)
            self._step(add, [], end)
            return
        if add.sequence.pooling is not None:
            self._embed(add, trouble)
            return
        done = len(add.output_ids) if add.output_ids is not None else 0
        limit = min(len(self.ids), add.sequence.params.max_tokens or len(self.ids))
        for position in range(done, limit):
            swallow = False
            if trouble is not None and position - done == trouble.after:
                swallow = trouble.swallow
                if trouble.hangs:
                    await self.hung.wait()
                elif trouble.error is None:
                    self.lose_tokenizer()
                elif not swallow:
                    raise trouble.error
            if position % self.steps_at_once == 0:
                await asyncio.sleep(0)
            end = None
            if position + 1 == limit:
                end = FinishedReq(add.rid, "length", len(PROMPT), limit, 3)
            if self._step(add, [self.ids[position]], end, position == done, swallow):
                return

    def _embed(self, add: AddRequest, trouble: Trouble | None) -> None:
        assert add.output_ids is None
        if trouble is not None:
            if trouble.error is not None:
                raise trouble.error
            self.lose_tokenizer()
        end = FinishedReq(add.rid, "stop", len(PROMPT), 0, 3)
        vector = np.asarray(add.sequence.prompt_ids, np.float32).tobytes()
        self._step(add, [], end, is_first=True, embeddings={add.rid: vector})

    def _step(
        self,
        add: AddRequest,
        tokens: list[int],
        end: FinishedReq | None,
        is_first: bool = False,
        swallow: bool = False,
        embeddings: dict[int, bytes] | None = None,
    ) -> bool:
        """One step's output through the detokenizer; whether a stop string ended it."""
        started = [(add.rid, 3 if add.output_ids is None else 1, 0.0)] if is_first else []
        prompt = None
        if started and add.sequence.params.prompt_logprobs is not None:
            prompt = {add.rid: [None, *(TokenLogprobs(-float(t), [], []) for t in PROMPT[1:])]}
        logprobs = None
        if add.sequence.params.logprobs is not None:
            logprobs = {i: TokenLogprobs(-float(t), [t], [-1.0]) for i, t in enumerate(tokens)}
        out = StepOutputs(
            0,
            [add.rid] * len(tokens),
            tokens,
            [end] if end is not None else [],
            started,
            logprobs,
            prompt,
            embeddings=embeddings,
        )
        if add.reply_to != self.address:
            return False  # its tokenizer is gone
        deltas, stopped = self.manager.process(out)
        # As over a socket: the reader gets its own copies.
        data = encoding.encode(tm.TextOutputs(deltas))
        if not swallow:
            self.attempts.deliver(encoding.decode(data, tm.TextOutputs).deltas)
        return bool(stopped)

    async def read(
        self, params: SamplingParams | None = None, known: Sequence[int] = (), **fields: Any
    ) -> list[TextDelta]:
        params = params or SamplingParams(temperature=0)
        request = TokenSequence(np.asarray(PROMPT, np.int32), params, "r", **fields)
        progress = Progress(request, self.limits, self.resumes, known_ids=known)
        deltas: list[TextDelta] = []
        await self.attempts.generate(progress, deltas.extend)
        return deltas


@dataclass
class Read:
    """What a reader has at the end."""

    text: str
    token_ids: list[int]
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    num_cached: set[int]
    last: tuple[Any, ...]


def gathered(deltas: list[TextDelta]) -> Read:
    last = deltas[-1]
    return Read(
        "".join(d.text for d in deltas),
        [t for d in deltas for t in d.token_ids],
        [e for d in deltas for e in d.logprobs or []],
        [d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None],
        {d.num_cached for d in deltas},
        (last.finish_reason, last.stop_reason, last.num_output, last.num_prompt),
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(write_byte_level(tmp_path_factory.mktemp("bytes")))


def read(world: World, params: SamplingParams | None = None, **fields: Any) -> Read:
    deltas = asyncio.run(world.read(params, **fields))
    assert len(world.attempts) == 0
    return gathered(deltas)


PARAMS = {
    "plain": SamplingParams(temperature=0),
    "logprobs": SamplingParams(temperature=0, logprobs=1, prompt_logprobs=0),
    "stop": SamplingParams(temperature=0, stop=["naïve 👩‍👩‍👦", "dog. de"], logprobs=0),
    "stop kept": SamplingParams(temperature=0, stop=["世界 f"], include_stop_str_in_output=True),
    "min tokens": SamplingParams(temperature=0, stop=["fox", "dog"], min_tokens=25),
    "length": SamplingParams(temperature=0, max_tokens=17),
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("return_token_ids", [False, True])
def test_a_loss_at_any_token_changes_nothing(
    tokenizer: Tokenizer, name: str, return_token_ids: bool
) -> None:
    params = PARAMS[name]
    expected = read(World(tokenizer), params, return_token_ids=return_token_ids)
    assert expected.text and expected.num_cached == {3}
    for after in range(1, expected.last[2]):
        for error in (DEAD, None):
            world = World(tokenizer, [Trouble(after, error)])
            assert read(world, params, return_token_ids=return_token_ids) == expected
            assert len(world.calls) == 2
            assert world.resumes == {"engine" if error else "tokenizer": 1}


@pytest.mark.parametrize("name", [name for name in PARAMS if "logprobs" not in name])
@pytest.mark.parametrize("return_token_ids", [False, True])
def test_known_tokens_give_the_same_deltas(
    tokenizer: Tokenizer, name: str, return_token_ids: bool
) -> None:
    """However many there are, and if an engine or the tokenizer is lost behind them."""
    params = msgspec.structs.replace(PARAMS[name], logprobs=None)

    def shown(deltas: list[TextDelta]) -> list[tuple[Any, ...]]:
        return [
            (d.text, d.token_ids, d.num_output, d.finish_reason, d.stop_reason, d.num_prompt)
            for d in deltas
        ]

    whole = asyncio.run(World(tokenizer).read(params, return_token_ids=return_token_ids))
    ids = [token for delta in whole for token in delta.token_ids]
    for count in range(len(ids) + 1):
        for trouble in ([], [Trouble(1, DEAD)], [Trouble(1, None)]):
            world = World(tokenizer, trouble)
            reading = world.read(params, ids[:count], return_token_ids=return_token_ids)
            assert shown(asyncio.run(reading)) == shown(whole)
            first = world.calls[0].output_ids
            assert (0 if first is None else len(first)) == max(count - 1, 0)
            assert len(world.attempts) == 0


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(PARAMS)),
    seed=st.integers(0, 2**20),
    return_token_ids=st.booleans(),
    steps_at_once=st.sampled_from([1, 2, 5]),
)
def test_many_losses_change_nothing(
    tokenizer: Tokenizer, name: str, seed: int, return_token_ids: bool, steps_at_once: int
) -> None:
    rng = random.Random(seed)
    troubles = []
    for _ in range(rng.randrange(1, 8)):
        error = rng.choice([DEAD, DRAINING, UNREACHABLE, None, asyncio.CancelledError()])
        # At least 3 tokens between losses: some bring no text and are not known to the reader.
        troubles.append(Trouble(rng.randrange(5, 9), error, swallow=rng.random() < 0.2))
    expected = read(World(tokenizer), PARAMS[name], return_token_ids=return_token_ids)
    world = World(tokenizer, troubles, steps_at_once=steps_at_once)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploy.ingress.attempt.END_TIMEOUT_S", 0.01)
        assert read(world, PARAMS[name], return_token_ids=return_token_ids) == expected


@pytest.mark.parametrize("losses", [[], [DEAD], [None], [DRAINING, None, UNREACHABLE]])
def test_an_embedding_is_computed_anew(
    tokenizer: Tokenizer, losses: list[Exception | None]
) -> None:
    world = World(tokenizer, [Trouble(0, error) for error in losses])
    (delta,) = asyncio.run(world.read(pooling="mean"))
    assert delta.embedding == np.asarray(PROMPT, np.float32).tobytes()
    assert (delta.finish_reason, delta.num_prompt, delta.num_output) == ("stop", 4, 0)
    assert delta.num_cached == 3 and not delta.text and not delta.token_ids
    assert [add.sequence.pooling for add in world.calls] == ["mean"] * (len(losses) + 1)
    assert world.resumes.total() == len(losses) and len(world.attempts) == 0


def test_resumed_request_is_a_new_one_with_its_output(tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=0, prompt_logprobs=0, seed=9)
    world = World(tokenizer, [Trouble(6, DEAD)])
    result = read(world, params, priority=3, namespace="s", return_token_ids=True)
    first, second = world.calls
    assert first.rid != second.rid
    assert first.output_ids is None and second.output_ids is not None
    assert second.output_ids.tolist() == world.ids[:6] == world.registered[1].output_ids
    assert (second.sequence.priority, second.sequence.namespace, second.sequence.params.seed) == (
        3,
        "s",
        9,
    )
    # The prompt's log-probabilities came with the first token and aren't computed again.
    assert second.sequence.params.prompt_logprobs is None and len(result.prompt_logprobs) == 1
    # The old registration is gone; the replica is told too, in case that only the call was lost.
    rid = first.rid
    assert (world.unregistered, world.aborted, world.cancelled) == ([rid], [rid], [])


def test_tokenizer_loss_aborts_what_the_engine_still_runs(tokenizer: Tokenizer) -> None:
    world = World(tokenizer, [Trouble(6, None)])
    read(world)
    assert world.aborted == [world.calls[0].rid]
    world = World(tokenizer, [Trouble(6, None)], knows_replicas=False)
    read(world)
    assert world.cancelled == [world.calls[0].rid], "without the replica's address: cancel"


def test_lost_twice_without_a_new_token(tokenizer: Tokenizer) -> None:
    world = World(tokenizer, [Trouble(6, DEAD), Trouble(0, UNREACHABLE)])
    with pytest.raises(RequestError) as caught:
        read(world)
    assert (caught.value.status, caught.value.code) == (500, "engine_lost_repeatedly")
    assert len(world.calls) == 2, "no third attempt"
    world = World(tokenizer, [Trouble(0, DEAD), Trouble(0, DEAD)])
    with pytest.raises(RequestError, match="2 engines"):
        read(world)


@dataclass
class OneEngine(World):
    """All requests are on one engine, and prefilled in turn; one of priority 1 ends it by that."""

    lives: int = 1
    last_life: int = 9
    cursed_lives: int = 0
    """Engines that end at their first prefill, whatever it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prefill = asyncio.Lock()

    async def _run(self, add: AddRequest, trouble: Trouble | None) -> None:
        life, prefill = self.lives, self.prefill
        if life > self.last_life:
            await self.hung.wait()
        self.attempts.taken(add.rid, f"replica-{life}")
        async with prefill:
            if life == self.lives:
                await asyncio.sleep(0.005)
                if add.sequence.priority == 1 or life <= self.cursed_lives:
                    self.lives, self.prefill = life + 1, asyncio.Lock()
        done = len(add.output_ids) if add.output_ids is not None else 0
        for position in range(done, len(self.ids)):
            if life != self.lives:
                await asyncio.sleep(0.02)  # until it is noticed
                raise DEAD
            is_last = position + 1 == len(self.ids)
            end = FinishedReq(add.rid, "length", len(PROMPT), position + 1, 3) if is_last else None
            self._step(add, [self.ids[position]], end, position == done)
            await asyncio.sleep(0.001)

    async def read_all(self, priorities: list[int]) -> list[list[TextDelta] | BaseException]:
        params = SamplingParams(temperature=0)
        return await asyncio.gather(
            *(self.read(params, priority=priority) for priority in priorities),
            return_exceptions=True,
        )


@pytest.mark.parametrize("place", [None, 0, 3, 7])
def test_only_the_request_that_ends_engines_fails(tokenizer: Tokenizer, place: int | None) -> None:
    expected = read(World(tokenizer))
    world = OneEngine(tokenizer)
    priorities = [int(at == place) for at in range(8)]
    for at, result in enumerate(asyncio.run(world.read_all(priorities))):
        if at == place:
            assert isinstance(result, RequestError)
            assert result.code == "engine_lost_repeatedly"
        else:
            assert isinstance(result, list), result
            assert gathered(result) == expected
    # The first two times any of them could have been the cause, the third time chance.
    assert world.lives == 1 + (4 if place is not None else 0)
    assert len(world.attempts) == 0 and len(world.manager) == 0


def test_engines_that_end_for_other_reasons_cost_no_request(tokenizer: Tokenizer) -> None:
    """Three in a row, before anybody has a token; the third under a request on trial."""
    expected = read(World(tokenizer))
    world = OneEngine(tokenizer, cursed_lives=3)
    for result in asyncio.run(world.read_all([0] * 8)):
        assert isinstance(result, list), result
        assert gathered(result) == expected
    assert world.lives == 4


def test_suspects_wait_for_an_engine_all_at_once(tokenizer: Tokenizer) -> None:
    """None comes any more: the first one's trial, which never begins, holds nobody up."""
    world = OneEngine(tokenizer, limits=ResumeLimits(wait_s=0.3), last_life=2)

    async def read_all() -> list[list[TextDelta] | BaseException]:
        async with asyncio.timeout(3.0):
            return await world.read_all([1] + [0] * 20)

    for result in asyncio.run(read_all()):
        assert isinstance(result, EngineDeadError), result


def test_progress_clears_the_blame(tokenizer: Tokenizer) -> None:
    troubles = [Trouble(0, DEAD), Trouble(5, DEAD), Trouble(5, DEAD), Trouble(5, DEAD)]
    world = World(tokenizer, troubles)
    assert read(world) == read(World(tokenizer))
    # A loss without progress, after one with: that makes two.
    world = World(tokenizer, [*troubles, Trouble(0, DEAD)])
    with pytest.raises(RequestError):
        read(world)


def test_drain_and_tokenizer_losses_blame_nobody(tokenizer: Tokenizer) -> None:
    troubles = [Trouble(0, DRAINING), Trouble(0, None), Trouble(0, DRAINING), Trouble(0, None)]
    world = World(tokenizer, [Trouble(4, DEAD), *troubles])
    assert read(world) == read(World(tokenizer))
    assert world.resumes == {"engine": 1, "drain": 2, "tokenizer": 2}


def test_number_of_resumes_is_bounded(tokenizer: Tokenizer) -> None:
    world = World(tokenizer, [Trouble(5, DEAD)] * 4, limits=ResumeLimits(max_resumes=3))
    with pytest.raises(RequestError, match="3 attempts") as caught:
        read(world)
    assert caught.value.code == "engine_lost_repeatedly"
    assert len(world.calls) == 4


def test_engine_that_never_took_the_request_is_not_its_fault(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.ingress.resume.RETRY_PAUSE_S", 0.0)
    refused = [Trouble(0, DEAD, is_taken=False), Trouble(0, UNREACHABLE, is_taken=False)] * 10
    world = World(tokenizer, [*refused, Trouble(0, RayServeException("no"), is_taken=False)])
    assert read(world) == read(World(tokenizer))
    assert world.resumes == {}, "nothing was under way"


@pytest.mark.parametrize(("is_taken", "is_last"), [(False, True), (True, False), (True, True)])
def test_a_replica_is_lost_whose_calls_do_not_end(
    tokenizer: Tokenizer, is_taken: bool, is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host may be gone: requests go on elsewhere at once. What the last replica has taken stays
    there until its call ends: it may only be cut off."""
    monkeypatch.setattr("deploy.ingress.resume.RETRY_PAUSE_S", 0.0)
    world = World(tokenizer, [Trouble(9, is_taken=is_taken, hangs=True)])

    async def run() -> Read:
        reading = asyncio.create_task(world.read())
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(world.calls) == 1 and not reading.done()
        world.attempts.replica_lost("replica-of-others", is_last=False)
        await asyncio.sleep(0.01)
        lost = f"replica-{world.calls[0].rid}"
        world.attempts.replica_lost(lost, is_last=is_last)
        await asyncio.sleep(0.01)
        assert len(world.calls) == (1 if is_taken and is_last else 2)
        world.hung.set()
        return gathered(await reading)

    assert asyncio.run(run()) == read(World(tokenizer))
    assert world.resumes == ({"engine": 1} if is_taken and not is_last else {})


def test_waits_for_an_engine_up_to_the_limit(tokenizer: Tokenizer) -> None:
    limits = ResumeLimits(wait_s=0.05)
    for troubles in ([], [Trouble(7, DEAD)]):
        hangs = Trouble(0, None, is_taken=False)
        world = World(tokenizer, [*troubles, *[hangs] * 9], limits=limits)
        with pytest.raises(EngineDeadError, match="waited"):
            read(world)
        assert world.cancelled == [world.calls[-1].rid]


def test_full_queue_waits_only_for_what_ran_before(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.ingress.resume.RETRY_PAUSE_S", 0.0)
    world = World(tokenizer, [Trouble(busy=True)])
    with pytest.raises(RequestError) as caught:
        read(world)
    assert caught.value.status == 429
    world = World(tokenizer, [Trouble(6, DEAD), Trouble(busy=True), Trouble(busy=True)])
    assert read(world) == read(World(tokenizer))


def test_lost_messages_are_noticed(tokenizer: Tokenizer) -> None:
    world = World(tokenizer, [Trouble(6, DEAD, swallow=True)])
    assert read(world, return_token_ids=True) == read(World(tokenizer), return_token_ids=True)
    assert world.resumes == {"engine": 1}


def test_call_that_ends_without_the_last_tokens(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.ingress.attempt.END_TIMEOUT_S", 0.01)
    world = World(tokenizer, [Trouble(len(World(tokenizer).ids) - 1, DEAD, swallow=True)])
    assert read(world) == read(World(tokenizer))


def test_bug_in_the_replica_is_no_loss(tokenizer: Tokenizer) -> None:
    bug = RayTaskError("generate", "traceback", ValueError("bug"))
    world = World(tokenizer, [Trouble(3, bug)])
    with pytest.raises(RayTaskError):
        read(world)
    assert len(world.calls) == 1


def test_reader_that_leaves_aborts(tokenizer: Tokenizer) -> None:
    async def run(world: World) -> None:
        request = TokenSequence(np.asarray(PROMPT, np.int32), SamplingParams(temperature=0), "r")
        progress = Progress(request, world.limits, world.resumes)
        has_text = asyncio.Event()
        run = asyncio.ensure_future(
            world.attempts.generate(progress, lambda deltas: has_text.set())
        )
        await has_text.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    world = World(tokenizer)
    asyncio.run(run(world))
    assert world.aborted == world.unregistered == [world.calls[0].rid]
    assert len(world.attempts) == 0 and len(world.manager) == 0


def test_reader_that_leaves_aborts_even_if_the_call_is_gone(tokenizer: Tokenizer) -> None:
    """Serve may have cancelled the call, and the replica not have heard of it."""

    async def run(leave: Callable[[World], bool]) -> World:
        world = World(tokenizer)
        request = TokenSequence(np.asarray(PROMPT, np.int32), SamplingParams(temperature=0), "r")
        progress = Progress(request, world.limits, world.resumes)
        reader = asyncio.ensure_future(world.attempts.generate(progress, lambda deltas: None))
        while not leave(world):
            await asyncio.sleep(0)
        (call,) = world.attempts._calls
        call.cancel()
        reader.cancel()
        await asyncio.wait([reader, call])
        return world

    def is_taken(world: World) -> bool:
        return any(attempt.replica for attempt in world.attempts._open.values())

    world = asyncio.run(run(is_taken))
    assert world.aborted == [world.calls[0].rid]
    # Here the replica's word comes after the reader has left.
    world = asyncio.run(run(lambda world: bool(world.calls)))
    assert world.aborted == []
    world.attempts.taken(world.calls[0].rid, "replica")
    assert world.aborted == [world.calls[0].rid]


def test_text_that_came_together_is_read_together(tokenizer: Tokenizer) -> None:
    async def run(world: World) -> list[list[TextDelta]]:
        request = TokenSequence(np.asarray(PROMPT, np.int32), SamplingParams(temperature=0), "r")
        progress = Progress(request, world.limits, world.resumes)
        batches: list[list[TextDelta]] = []
        await world.attempts.generate(progress, batches.append)
        return batches

    world = World(tokenizer, steps_at_once=5)
    batches = asyncio.run(run(world))
    assert max(map(len, batches)) == 5
    text = "".join(delta.text for deltas in batches for delta in deltas)
    assert text == TEXT and batches[-1][-1].finish_reason == "length"


def test_a_reader_that_fails_ends_its_own_request_only(tokenizer: Tokenizer) -> None:
    async def run(world: World) -> list[Any]:
        def fail(deltas: list[TextDelta]) -> None:
            raise ValueError("the reader's fault")

        good: list[TextDelta] = []
        request = TokenSequence(np.asarray(PROMPT, np.int32), SamplingParams(temperature=0), "r")
        results = await asyncio.gather(
            *(
                world.attempts.generate(Progress(request, world.limits, world.resumes), read)
                for read in (fail, good.extend, fail)
            ),
            return_exceptions=True,
        )
        assert gathered(good).text == TEXT
        return results

    world = World(tokenizer)
    results = asyncio.run(run(world))
    assert [type(result) for result in results] == [ValueError, type(None), ValueError]
    assert len(world.aborted) == 2 and not world.resumes and len(world.attempts) == 0


def test_tokenizer_lost_while_registering(tokenizer: Tokenizer) -> None:
    class Flaky(World):
        async def ask_once(self, make: Callable[[int], Any], wait_s: float) -> tm.Registered:
            if not self.registered:
                self.registered.append(make(1))
                raise TokenizerLostError
            return await super().ask_once(make, wait_s)

    world = Flaky(tokenizer)
    assert read(world) == read(World(tokenizer))
    assert len(world.calls) == 1 and world.resumes == {"tokenizer": 1}


def test_the_tokenizer_is_told_the_end_of_a_prompt() -> None:
    """All of it where its log-probabilities are wanted, until they have come."""
    prompt = np.arange(100, dtype=np.int32)
    for params, expected in (
        (SamplingParams(), prompt[-tm.PROMPT_TAIL :]),
        (SamplingParams(prompt_logprobs=0), prompt),
    ):
        progress = Progress(TokenSequence(prompt, params), ResumeLimits(), Counter())
        message = progress.register(1, "ingress", 2)
        assert (message.num_prompt, message.prompt_ids) == (100, expected.tolist())
    progress.take(TextDelta(2, "a", [1], 1, None, None, 100, 3))
    again = progress.register(2, "ingress", 3)
    assert (again.num_prompt, again.prompt_ids) == (100, prompt[-tm.PROMPT_TAIL :].tolist())
    assert again.output_ids == [1]
