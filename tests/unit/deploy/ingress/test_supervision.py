"""Who notices that somebody is silent, gone or stopping, and what they do about it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.serve._private.common import (
    DeploymentStatus,
    DeploymentStatusInfo,
    DeploymentStatusTrigger,
    ReplicaState,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.ingress import engine_watch, tokenizer_link
from deploy.ingress.engine_watch import EngineWatch
from deploy.ingress.listener import IngressListener
from deploy.ingress.tokenizer_link import TokenizerLink
from deploy.replica.ingress_links import IngressLinks
from deploy.replica.open_calls import OpenCalls
from deploy.serve_state import drain_watch, replica_states
from deploy.serve_state.drain_watch import DrainWatch
from deploy.serve_state.replica_states import (
    DeploymentState,
    ServeStates,
    deployment_states,
    engine_target,
    replicas_lost,
)
from engine.actors import actor_process, role_watch
from engine.actors.actor_process import ActorProcess
from engine.actors.role_watch import RoleWatch
from engine.errors import EngineDeadError, EngineDrainingError, RequestError
from engine.process import pulse
from engine.process.pulse import MAX_TICK_S, Pulse
from engine.protocol import tokenizer_messages as tm
from engine.protocol.async_inbox import AsyncInbox
from engine.protocol.messages import AbortRequest, Ping, Pong, ReaderGone, RequestTaken, Shutdown
from engine.protocol.transport import Inbox


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def test_pulse_counts_only_what_the_observer_saw() -> None:
    pulse = Pulse(100.0)
    assert pulse.tick(100.2) == pytest.approx(0.2)
    assert pulse.tick(100.6) == pytest.approx(0.6)
    # The observer itself was stopped for a minute: that says nothing about the peer.
    assert pulse.tick(160.6) == pytest.approx(0.6 + MAX_TICK_S)
    pulse.beat()
    assert pulse.tick(160.8) == pytest.approx(0.2)


# Actors


class FakeMethod:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


def actor(pulse: Callable[[], Any]) -> Any:
    return SimpleNamespace(pulse=FakeMethod(pulse))


async def answer(value: float) -> float:
    await asyncio.sleep(0)
    return value


async def never() -> float:
    await asyncio.Event().wait()
    return 0.0


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_watch, "PING_PERIOD_S", 0.01)
    monkeypatch.setattr(role_watch, "LOOK_PERIOD_S", 0.005)
    monkeypatch.setattr(role_watch, "UNWELL_S", 0.05)
    monkeypatch.setattr(engine_watch, "PING_PERIOD_S", 0.01)
    monkeypatch.setattr(engine_watch, "INTRODUCE_PERIOD_S", 0.05)
    monkeypatch.setattr(engine_watch, "CONFIRM_S", 0.05)
    # As little beside the other times as half a second is beside the real ones.
    monkeypatch.setattr(pulse, "MAX_TICK_S", 0.05)
    monkeypatch.setattr(drain_watch, "HEALTH_PERIOD_S", 0.01)
    monkeypatch.setattr(drain_watch, "SILENCE_S", 0.1)


def test_role_watch_names_who_hangs(fast: None) -> None:
    async def run() -> None:
        watch = RoleWatch({"a": actor(lambda: answer(0.0)), "b": actor(never)}, 0.3)
        watching = asyncio.ensure_future(watch.run())
        await until(lambda: watch.unwell)
        assert watch.unwell.startswith("b hasn't answered") and not watching.done()
        assert (await watching).startswith("b hangs")

    asyncio.run(run())


def test_role_that_answers_again_is_well(fast: None) -> None:
    async def run() -> None:
        gate = asyncio.Event()
        calls = deque([gate.wait])

        async def pulse() -> float:
            if calls:
                await calls.pop()()
            return 0.0

        watch = RoleWatch({"a": actor(pulse)}, 1e9)
        watching = asyncio.ensure_future(watch.run())
        await until(lambda: watch.unwell)
        gate.set()
        await until(lambda: not watch.unwell)
        assert not watching.done()
        watching.cancel()

    asyncio.run(run())


def test_loop_that_stands_still_hangs_though_its_process_answers(fast: None) -> None:
    async def run() -> None:
        watch = RoleWatch({"scheduler": actor(lambda: answer(7.0))}, 5.0)
        assert await watch.run() == "scheduler hangs: no answer for 7 s"

    asyncio.run(run())


@pytest.mark.parametrize("other", [None, 4.0])
def test_a_step_without_progress_hangs_if_no_other_worker_goes_on(
    fast: None, other: float | None
) -> None:
    """One without a step says nothing of the others."""

    async def run() -> None:
        roles = {"worker 0": actor(lambda: answer(7.0)), "worker 1": actor(lambda: hold(other))}
        watch = RoleWatch(roles, 3.0, frozenset(roles))
        assert (await watch.run()).startswith("worker 0 hangs: its step has made no progress")
        assert "worker 0 hangs in a step" in watch.unwell

    asyncio.run(run())


def test_a_worker_that_waits_for_one_that_computes_is_well(fast: None) -> None:
    async def run() -> None:
        roles = {"worker 0": actor(lambda: answer(7.0)), "worker 1": actor(lambda: hold(0.0))}
        watch = RoleWatch(roles, 3.0, frozenset(roles))
        watching = asyncio.ensure_future(watch.run())
        await until(lambda: watch._stuck["worker 1"] == 0.0 and watch._stuck["worker 0"] == 7.0)
        assert watch.unwell == "" and not watching.done()
        watching.cancel()

    asyncio.run(run())


async def hold(value: float | None) -> float | None:
    await asyncio.sleep(0)
    return value


def test_kill_ends_a_stopped_process_and_spares_a_reused_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[str] = []
    monkeypatch.setattr(actor_process, "this_node", lambda: "here")
    monkeypatch.setattr(actor_process.ray, "kill", killed.append)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        started = actor_process.started_at(child.pid)
        ActorProcess("here", child.pid, started + 1).kill("reused id")
        ActorProcess("elsewhere", child.pid, started).kill("other node")
        assert child.poll() is None
        ActorProcess("here", child.pid, started).kill("it")
        assert child.wait(20) == -signal.SIGKILL
        ActorProcess("here", child.pid, started).kill("gone")
        assert killed == ["reused id", "other node", "it", "gone"]
    finally:
        child.kill()


# The engine replica's side


def test_open_calls_end_fail_and_forget() -> None:
    async def run() -> None:
        calls = OpenCalls()
        first = calls.open("c", 1, "ingress a")
        second = calls.open("c", 2, "ingress a")
        third = calls.open("d", 1, "ingress b")
        calls.end([("c", 1), ("nobody", 9)])
        await first
        assert calls.fail(EngineDrainingError("silent")) == 2
        for failed in (second, third):
            with pytest.raises(EngineDrainingError, match="silent"):
                await failed
        late = calls.open("d", 2, "ingress b")
        calls.close("d", 2)
        assert calls.fail(EngineDeadError("lost")) == 0
        assert not late.done() and len(calls) == 3

    asyncio.run(run())


def test_calls_of_an_ingress_that_is_gone_stay_open_until_it_is_back() -> None:
    """To end them would hold the replica's loop up, a second for each."""

    async def run() -> None:
        calls = OpenCalls()
        lost = [calls.open("c", rid, "ingress a") for rid in range(3)]
        other = calls.open("d", 1, "ingress b")
        calls.close("c", 0)
        assert calls.abandon("ingress a") == [("c", 1), ("c", 2)]
        assert (len(calls), calls.num_abandoned) == (1, 2)
        calls.end([("c", 1), ("d", 1)])  # the scheduler obeyed; another's request ended
        await other
        assert calls.fail(EngineDeadError("lost")) == 0
        assert not any(call.done() for call in lost)
        calls.recall("ingress b", EngineDrainingError("silent"))
        assert not any(call.done() for call in lost)
        calls.recall("ingress a", EngineDrainingError("silent"))
        for call in lost[1:]:
            with pytest.raises(EngineDrainingError, match="silent"):
                await call
        assert calls.num_abandoned == 0
        calls.end([("c", 1)])

    asyncio.run(run())


def test_each_failed_call_has_an_exception_of_its_own() -> None:
    async def run() -> None:
        calls = OpenCalls()
        waits = [calls.open("c", i, "i") for i in range(2)]
        calls.fail(EngineDeadError("lost"))
        errors = await asyncio.gather(*waits, return_exceptions=True)
        assert errors[0] is not errors[1] and str(errors[0]) == str(errors[1]) == "lost"

    asyncio.run(run())


def test_ingress_links_drop_who_is_silent() -> None:
    inbox = Inbox()
    links = IngressLinks()
    try:
        links.heard(inbox.address, 0.0)
        links.heard("tcp://127.0.0.1:9#00", 0.0)
        links.send(inbox.address, RequestTaken(5, "r"))
        assert inbox.recv(10.0) == RequestTaken(5, "r")
        now = 0.0
        dropped: list[str] = []
        while now < 10.0:
            now += 0.25
            links.heard(inbox.address, now)
            dropped += links.drop_silent(now, 5.0)
        assert dropped == ["tcp://127.0.0.1:9#00"]
    finally:
        links.close()
        inbox.close()


# The ingress's side


class FakeReplica:
    """Answers pings while `answers`."""

    def __init__(self) -> None:
        self.answers = True
        self.got: list[Any] = []
        self.inbox = AsyncInbox("127.0.0.1", self._on_message)
        self.links = IngressLinks()

    def pong(self) -> Pong:
        return Pong(self.inbox.address, "actor", "serve", "node", 1, 2)

    def _on_message(self, message: Any) -> None:
        self.got.append(message)
        if isinstance(message, Ping) and self.answers:
            self.links.heard(message.reply_to, 0.0)
            self.links.send(message.reply_to, self.pong())

    def close(self) -> None:
        self.links.close()
        self.inbox.close()


class FakeHandle:
    """Serve's handle: `introduce` reaches `replica`."""

    def __init__(self, replica: FakeReplica) -> None:
        self.replica = replica

    def broadcast(self, method: str, ingress: str) -> FakeHandle:
        assert method == "introduce"
        self.replica.links.heard(ingress, 0.0)
        self.replica.links.send(ingress, self.replica.pong())
        return self

    async def results_async(self, **_: Any) -> list[Any]:
        return [None]


def engine_watch_run(
    answers_ray: bool, comes_back: bool = False
) -> tuple[bool, list[str], list[Any]]:
    """A replica introduces itself, works, falls silent, and maybe `comes_back` while Ray is asked
    about it: (whether an abort could still be sent a while later, who was killed, what the
    replica got)."""

    async def run() -> tuple[bool, list[str], list[Any]]:
        asked: list[str] = []
        killed: list[str] = []

        async def answers(pong: Pong) -> bool:
            asked.append(pong.actor)
            if comes_back:
                watch.heard(pong.replica, pong)
            return answers_ray

        replica = FakeReplica()
        watch: EngineWatch

        def on_message(message: Any) -> None:
            assert isinstance(message, Pong)
            watch.heard(message.replica, message)

        inbox = AsyncInbox("127.0.0.1", on_message)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_watch, "_answers_ray", answers)
            patch.setattr(engine_watch, "_kill", lambda pong: killed.append(pong.actor))
            watch = EngineWatch(FakeHandle(replica), inbox.address, 0.3, Mock(IngressListener))
            watch.start()
            abort = AbortRequest(rid=1, reply_to="c")
            await until(lambda: watch.send(replica.inbox.address, abort))
            watch.reader_gone("c")
            await until(lambda: ReaderGone("c") in replica.got)
            assert not asked
            replica.answers = False
            watch._engines = FakeHandle(FakeReplica())
            await until(lambda: asked if answers_ray or comes_back else killed)
            await asyncio.sleep(0.05)
            known = watch.send(replica.inbox.address, abort)
            watch.close()
        inbox.close()
        replica.close()
        return known, killed, replica.got

    return asyncio.run(run())


def test_engine_watch_ends_and_forgets_a_replica_that_hangs(fast: None) -> None:
    known, killed, got = engine_watch_run(answers_ray=False)
    assert not known and len(killed) == 1
    assert AbortRequest(rid=1, reply_to="c") in got


@pytest.mark.parametrize(("answers_ray", "comes_back"), [(True, False), (False, True)])
def test_engine_watch_keeps_a_replica_that_lives(
    answers_ray: bool, comes_back: bool, fast: None
) -> None:
    known, killed, _ = engine_watch_run(answers_ray, comes_back)
    assert known and not killed


THIS_NODE = "a" * 56


class FakeTokenizers:
    """Stands for the actor class; `made` are the actors, each with a real inbox."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[FakeTokenizer] = []
        self.failing = 0
        self.lost: list[str] = []
        self.listener = Mock(IngressListener, tokenizer_lost=self.lost.append)
        monkeypatch.setattr(tokenizer_link, "RemoteTokenizerActor", self)
        monkeypatch.setattr(tokenizer_link, "this_node", lambda: THIS_NODE)
        monkeypatch.setattr(tokenizer_link.ray, "kill", lambda _: None)
        monkeypatch.setattr(tokenizer_link, "START_PAUSE_S", 0.0)

    def options(self, scheduling_strategy: NodeAffinitySchedulingStrategy) -> FakeTokenizers:
        """A tokenizer on another node would be lost with that node, too."""
        assert (scheduling_strategy.node_id, scheduling_strategy.soft) == (THIS_NODE, False)
        return self

    def remote(self, *_: str) -> FakeTokenizer:
        tokenizer = FakeTokenizer(fails=self.failing > 0)
        self.failing -= tokenizer.fails
        self.made.append(tokenizer)
        return tokenizer

    def link(self) -> TokenizerLink:
        return TokenizerLink("model", 1e9, self.listener)

    def close(self) -> None:
        for tokenizer in self.made:
            tokenizer.inbox.close()


class FakeTokenizer:
    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.inbox = Inbox()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.describe = FakeMethod(self._describe)
        self.run = FakeMethod(lambda: self.ended)
        self.pulse = FakeMethod(lambda: answer(0.0))
        self.killed = False

    def _describe(self) -> Any:
        described: concurrent.futures.Future[Any] = concurrent.futures.Future()
        if self.fails:
            described.set_exception(TimeoutError())
        else:
            described.set_result((self.inbox.address, self))
        return SimpleNamespace(future=lambda: described)

    def kill(self, _: Any) -> None:
        self.killed = True

    def die(self) -> None:
        self.ended.set_exception(ValueError("killed"))

    async def next(self) -> Any:
        message = None
        async with asyncio.timeout(20):
            while message is None:
                await asyncio.sleep(0.002)
                message = self.inbox.recv(0.0)
        return message


def encode(call: int) -> tm.EncodeRequest:
    return tm.EncodeRequest(call, "ingress", ["text"])


@pytest.mark.parametrize("first", ["cancel", "answer"])
def test_a_cancellation_that_arrives_with_the_answer_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Of 200 questions whose askers leave in the turn of the loop that brings the answer."""

    async def run() -> None:
        tokenizers = FakeTokenizers(monkeypatch)
        link = tokenizers.link()
        await link.start()
        asking = [asyncio.ensure_future(link.ask(encode, 10.0)) for _ in range(200)]
        calls = [(await tokenizers.made[0].next()).call for _ in asking]
        for call, task in zip(calls, asking, strict=True):
            if first == "cancel":
                task.cancel()
            link.answer(call, "reply")
            if first == "answer":
                task.cancel()
        await asyncio.wait(asking)
        link.stop()
        tokenizers.close()
        assert [task for task in asking if not task.cancelled()] == []

    asyncio.run(run())


@pytest.mark.parametrize("deaths", [0, 1, 2])
def test_question_outlives_one_tokenizer_not_two(
    monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    async def run() -> None:
        tokenizers = FakeTokenizers(monkeypatch)
        link = tokenizers.link()
        await link.start()
        asking = asyncio.ensure_future(link.ask(encode, 10.0))
        for i in range(deaths):
            asked = await tokenizers.made[i].next()
            assert asked.texts == ["text"]
            tokenizers.made[i].die()
            await until(lambda i=i: len(tokenizers.made) > i + 1 and not link.unwell)
        if deaths < 2:
            asked = await tokenizers.made[deaths].next()
            link.answer(asked.call, "reply")
            assert await asking == "reply"
        else:
            with pytest.raises(RequestError) as caught:
                await asking
            assert caught.value.code == "tokenizer_lost_repeatedly"
        addresses = [t.inbox.address for t in tokenizers.made]
        assert (tokenizers.lost, link.address) == (addresses[:deaths], addresses[deaths])
        assert [t.killed for t in tokenizers.made] == [True] * deaths + [False]
        link.stop()
        assert await tokenizers.made[deaths].next() == Shutdown()
        tokenizers.close()

    asyncio.run(run())


def test_no_tokenizer_in_time_and_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        tokenizers = FakeTokenizers(monkeypatch)
        monkeypatch.setattr(tokenizer_link, "START_PAUSE_S", 0.05)
        link = tokenizers.link()
        await link.start()
        link.check()
        tokenizers.failing = tokenizer_link.MAX_FAILED_STARTS
        tokenizers.made[0].die()
        await until(lambda: link.unwell)
        with pytest.raises(EngineDeadError, match="no tokenizer"):
            await link.ask(encode, 0.01)
        with pytest.raises(EngineDeadError, match="failed to start"):
            await until(link.check)
        await until(lambda: not link.unwell)
        link.check()
        link.stop()
        tokenizers.close()

    asyncio.run(run())


# Serve's side


def test_drain_watch_asks_only_after_silence(fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        states = deque([RuntimeError("no controller"), False, True])
        asked: list[Any] = []

        def listed_as_stopping() -> bool:
            asked.append(states.popleft())
            if isinstance(asked[-1], Exception):
                raise asked[-1]
            return bool(asked[-1])

        monkeypatch.setattr(drain_watch, "listed_as_stopping", listed_as_stopping)
        watch = DrainWatch()
        waiting = asyncio.ensure_future(watch.wait(0.0))
        for _ in range(20):
            watch.asked()
            await asyncio.sleep(0.01)
        assert not asked
        await waiting
        assert not states

    asyncio.run(run())


@pytest.mark.parametrize(
    ("engine", "ingress", "alive", "words"),
    [
        (("HEALTHY", {"RUNNING": 2}), ("HEALTHY", {"RUNNING": 1}), 2, []),
        (("HEALTHY", {"RUNNING": 2}), ("HEALTHY", {"RUNNING": 1}), 1, ["1 of 2"]),
        (("HEALTHY", {"RUNNING": 1, "STARTING": 1}), ("HEALTHY", {}), 1, ["engine: HEALTHY"]),
        (("UNHEALTHY", {"RUNNING": 2}), ("HEALTHY", {}), 2, ["engine: UNHEALTHY"]),
        (("UPDATING", {"RUNNING": 1, "STARTING": 1}), ("HEALTHY", {}), 1, ["UPDATING"]),
        (("UPSCALING", {"RUNNING": 1, "STARTING": 1}), ("HEALTHY", {}), 1, []),
        (("DOWNSCALING", {"RUNNING": 1, "STOPPING": 1}), ("HEALTHY", {}), 1, []),
        (("HEALTHY", {"RUNNING": 1, "STOPPING": 1}), ("HEALTHY", {}), 1, []),
        (("HEALTHY", {"RUNNING": 1}), ("UNHEALTHY", {"STARTING": 1}), 1, ["ingress"]),
    ],
)
def test_replicas_lost(
    engine: tuple[str, dict[str, int]],
    ingress: tuple[str, dict[str, int]],
    alive: int,
    words: list[str],
) -> None:
    deployments = {
        name: DeploymentState(status, names_of(states), 1)
        for name, (status, states) in (("engine", engine), ("ingress", ingress))
    }
    told = replicas_lost(deployments, alive)
    assert bool(told) == bool(words)
    assert all(word in told for word in words)


def names_of(counts: dict[str, int]) -> dict[str, str]:
    return {f"{state}{n}": state for state, count in counts.items() for n in range(count)}


# What Serve's controller says


class FakeController:
    """Serve's controller with one engine and one ingress. Until it is `listed` again, as after a
    deploy that was refused, the application has no deployments."""

    def __init__(self, status: DeploymentStatus = DeploymentStatus.HEALTHY) -> None:
        self.listed = True
        self.exists = True
        self.running = {"engine": ["e"], "ingress": ["i"]}
        self._status = status
        self._controller = SimpleNamespace(
            get_deployment_status=FakeMethod(self._deployment_status),
            listen_for_change=FakeMethod(self._targets),
        )

    def get_serve_details(self) -> dict[str, Any]:
        deployments = {
            name: {
                "status": self._status,
                "target_num_replicas": 1,
                "replicas": [{"replica_id": r, "state": ReplicaState.RUNNING} for r in replicas],
            }
            for name, replicas in self.running.items()
        }
        apps = {"llm": {"deployments": deployments if self.listed else {}}}
        return {"applications": apps if self.exists else {}}

    def _deployment_status(self, name: str, app: str) -> bytes | None:
        assert app == "llm"
        trigger = DeploymentStatusTrigger.CONFIG_UPDATE_STARTED
        status = DeploymentStatusInfo(name, self._status, trigger)
        return status.to_proto().SerializeToString() if self.exists else None

    def _targets(self, keys: dict[Any, int]) -> dict[Any, Any]:
        return {
            key: SimpleNamespace(
                object_snapshot=SimpleNamespace(
                    running_replicas=[
                        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))
                        for name in self.running[key[1].name]
                    ]
                )
            )
            for key in keys
        }


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> FakeController:
    fake = FakeController()
    replica = SimpleNamespace(unique_id="e")
    context = SimpleNamespace(app_name="llm", deployment="engine", replica_id=replica)
    monkeypatch.setattr(replica_states, "_get_global_client", lambda: fake)
    monkeypatch.setattr(replica_states.ray, "get", lambda answer: answer)
    monkeypatch.setattr(replica_states.serve, "get_replica_context", lambda: context)
    return fake


@pytest.mark.parametrize("listed", [True, False])
def test_replicas_are_known_though_a_refused_deploy_has_unlisted_them(
    controller: FakeController, listed: bool
) -> None:
    controller.listed = listed
    states = deployment_states()
    assert replicas_lost(states, 1) == ""
    assert replicas_lost(states, 0) == "1 of 1 engine replicas are gone"
    assert not drain_watch.listed_as_stopping()
    target = engine_target(states)
    assert target is not None and target.states == {"e": "RUNNING"}
    controller.running["engine"] = ["other"]
    assert drain_watch.listed_as_stopping()


def test_a_deleted_application_is_not_healthy(controller: FakeController) -> None:
    controller.exists = False
    assert "engine: Serve has deleted it" in replicas_lost(deployment_states(), 1)
    assert drain_watch.listed_as_stopping()


def test_a_controller_that_hangs_takes_one_thread(
    monkeypatch: pytest.MonkeyPatch, controller: FakeController
) -> None:
    gate, asked = threading.Event(), []

    def slow(engine: str) -> dict[str, DeploymentState]:
        asked.append(1)
        gate.wait(20)
        return {}

    async def run() -> None:
        monkeypatch.setattr(replica_states, "deployment_states", slow)
        states = ServeStates()
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await states.ask(0.01)
        gate.set()
        assert await states.ask(20) == {}
        assert len(asked) == 1

    asyncio.run(run())
