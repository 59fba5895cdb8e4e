"""`GrammarGuard`: grammars that crash or hang the compiler cost their own request alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.constraints import ConstraintSpec, guard_process, structured
from engine.constraints import guard as guard_module
from engine.constraints.guard import GrammarGuard
from engine.errors import RequestError
from tests.support.grammars import MODEL
from tests.support.hostile_grammars import MAY_PASS, NEVER_PASS
from tests.support.source_files import ROOT

GOOD = structured.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
ANSWER_S = 8.0
"""2 s on a machine that does nothing else; a hang takes longer than this on any."""
FAKE = """
import os, signal, sys, time
from engine.grammars import guard_child
from engine.constraints.grammar import Grammar

def create(payload, vocab_size, eos, grammars):
    match payload["value"]:
        case "crash": os.kill(os.getpid(), signal.SIGSEGV)
        case "abort": os.abort()
        case "hang": time.sleep(100)
        case "spin":
            while True: pass
        case "memory": bytearray(2**33)
        case "kill": os.kill(os.getppid(), signal.SIGKILL); time.sleep(100)
        case "print": print("x" * 10_000, flush=True)
    return real(payload, vocab_size, eos, grammars)

real, Grammar.create = Grammar.create, create
guard_child.main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.fixture(scope="module")
def guard() -> Iterator[GrammarGuard]:
    made = GrammarGuard(MODEL)
    yield made
    made.shutdown()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., GrammarGuard]]:
    """Guards whose process does what the regular expression says."""
    (tmp_path / "fake_grammar_process.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setattr(guard_process, "MODULE", "fake_grammar_process")
    made: list[GrammarGuard] = []

    def make(**options: Any) -> GrammarGuard:
        made.append(GrammarGuard(MODEL, **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def pid_of(guard: GrammarGuard) -> int:
    assert guard.process is not None
    return guard.process.pid


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it doesn't happen"
        time.sleep(0.01)


@pytest.mark.parametrize("name", [*MAY_PASS, *NEVER_PASS])
def test_hostile_grammars_are_answered_in_time(guard: GrammarGuard, name: str) -> None:
    guard.check(GOOD)
    began = time.monotonic()
    if name in MAY_PASS:
        guard.check(MAY_PASS[name])
    else:
        with pytest.raises(RequestError) as refused:
            guard.check(NEVER_PASS[name])
        assert (refused.value.status, refused.value.param) == (400, "constraint")
        assert 10 < len(refused.value.message) < 500
    assert time.monotonic() - began < ANSWER_S
    guard.check(structured.choice([f"after {name}"]))


def test_a_remote_schema_is_not_fetched(guard: GrammarGuard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        with pytest.raises(RequestError, match="retrieving it failed"):
            guard.check(structured.json_schema({"$ref": address}))
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


def test_other_constraints_pass_without_a_process() -> None:
    guard = GrammarGuard("no such folder")
    guard.check(ConstraintSpec("token_choice", {"choices": [[1]]}))
    with pytest.raises(RequestError, match="needs a string"):
        guard.check(ConstraintSpec("grammar", {"type": "regex", "value": ["a"]}))
    assert guard.process is None


# What happens to the process


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("crash", "crashes the compiler .stack overflow"),
        ("abort", "crashes the compiler"),
        ("memory", "crashes the compiler .out of memory"),
        ("spin", "takes longer than 0.3 s"),
    ],
)
def test_death_of_a_compilation_costs_its_grammar_alone(
    fake: Callable[..., GrammarGuard], what: str, words: str
) -> None:
    guard = fake(timeout_s=0.3)
    guard.check(GOOD)
    pid = pid_of(guard)
    for _ in range(20):
        began = time.monotonic()
        with pytest.raises(RequestError) as refused:
            guard.check(structured.regex(what))
        assert time.monotonic() - began < ANSWER_S
        if refused.value.status != 503:  # the machine was too busy to tell: no verdict
            break
    refused.match(words)
    assert (refused.value.status, refused.value.param) == (400, "constraint")
    guard.check(structured.regex("good"))
    assert pid_of(guard) == pid, "the tokenizer need not be loaded again"
    until(lambda: not children_of(pid))


def test_a_check_without_the_cpu_says_nothing_about_its_grammar(
    fake: Callable[..., GrammarGuard],
) -> None:
    """The time limit counts CPU time; a process that gets none is ended later, without a verdict
    that would be remembered."""
    guard = fake(timeout_s=0.3)
    for _ in range(2):
        with pytest.raises(RequestError, match="too busy") as refused:
            guard.check(structured.regex("hang"))
        assert refused.value.status == 503
    guard.check(structured.regex("good"))


def test_what_a_grammar_prints_goes_astray(fake: Callable[..., GrammarGuard]) -> None:
    guard = fake()
    guard.check(structured.regex("print"))
    guard.check(GOOD)


def test_loss_of_the_process_itself_is_tried_once_more(fake: Callable[..., GrammarGuard]) -> None:
    guard = fake()
    guard.check(GOOD)
    pid = pid_of(guard)
    os.kill(pid, signal.SIGKILL)
    guard.check(structured.regex("a"))
    assert pid_of(guard) != pid
    with pytest.raises(RequestError, match="isn't available now") as refused:
        guard.check(structured.regex("kill"))
    assert refused.value.status == 503
    guard.check(structured.regex("b"))


def test_folder_that_has_no_model(tmp_path: Path) -> None:
    guard = GrammarGuard(tmp_path)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"isn't available: .*config\.json") as refused:
            guard.check(GOOD)
        assert refused.value.status == 400
        (tmp_path / "config.json").mkdir(exist_ok=True)  # nobody looks again
    guard.shutdown()


def test_verdicts_are_remembered(fake: Callable[..., GrammarGuard]) -> None:
    now = 0.0
    guard = fake(timeout_s=0.3, clock=lambda: now)
    for what in ("crash", "spin"):
        with pytest.raises(RequestError) as first:
            guard.check(structured.regex(what))
        os.kill(pid_of(guard), signal.SIGSTOP)  # it couldn't answer
        with pytest.raises(RequestError) as second:
            guard.check(structured.regex(what))
        assert second.value.message == first.value.message
        os.kill(pid_of(guard), signal.SIGCONT)
    guard.check(GOOD)
    pid = pid_of(guard)
    os.kill(pid, signal.SIGKILL)
    guard.check(GOOD)
    now = 1e6  # what took too long once is tried again some time later; a crash isn't
    with pytest.raises(RequestError, match="crashes"):
        guard.check(structured.regex("crash"))
    assert pid_of(guard) == pid
    with pytest.raises(RequestError, match="takes longer"):
        guard.check(structured.regex("spin"))
    assert pid_of(guard) != pid


def test_memory_of_verdicts_is_bounded(
    fake: Callable[..., GrammarGuard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "MAX_VERDICTS", 3)
    guard = fake()
    for i in range(5):
        guard.check(structured.regex(f"a{i}"))
    assert len(guard.verdicts) == 3


def test_several_threads_ask_at_once(guard: GrammarGuard) -> None:
    def ask(i: int) -> str:
        try:
            guard.check(structured.regex(f"x{i % 7}" if i % 3 else f"(x{i % 7}"))
        except RequestError as error:
            return error.message
        return ""

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(60)))
    assert [bool(message) for message in found] == [i % 3 == 0 for i in range(60)]


def test_too_many_grammars_at_once_are_refused(
    fake: Callable[..., GrammarGuard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "MAX_WAITING", 3)
    guard = fake(timeout_s=0.5)
    guard.check(GOOD)
    hanging = guard.submit(structured.regex("spin"))
    waiting = [guard.submit(structured.regex(f"a{i}")) for i in range(2)]
    with pytest.raises(RequestError, match="wait to be checked") as refused:
        guard.check(structured.regex("b"))
    assert refused.value.status == 429
    guard.check(GOOD)  # it is known already
    assert hanging.exception() is not None
    for future in waiting:
        future.result()
    guard.check(structured.regex("b"))


def test_a_caller_that_leaves_holds_nobody_up(fake: Callable[..., GrammarGuard]) -> None:
    guard = fake(timeout_s=0.5)
    guard.check(GOOD)
    spinning = guard.submit(structured.regex("spin"))
    assert guard.submit(structured.regex("a")).cancel()
    guard.check(structured.regex("b"))
    assert spinning.done() and guard.num_waiting == 0


# Its end


def test_shutdown_ends_the_process_also_in_the_middle(fake: Callable[..., GrammarGuard]) -> None:
    guard = fake(timeout_s=60.0)
    guard.check(GOOD)
    pid = pid_of(guard)
    hanging = guard.submit(structured.regex("hang"))
    until(lambda: bool(children_of(pid)))
    (child,) = children_of(pid)
    guard.shutdown()
    guard.shutdown()
    until(lambda: not is_alive(pid) and not is_alive(child))
    assert isinstance(hanging.exception(ANSWER_S), RequestError)
    with pytest.raises(RequestError, match="being stopped"):
        guard.check(structured.regex("later"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_no_process_is_left_behind(
    fake: Callable[..., GrammarGuard], how: signal.Signals | None, busy: bool
) -> None:
    """However the owner ends: by a signal, or at the end of its program."""
    code = f"""
import sys, time
from engine.constraints import guard_process, structured
from engine.constraints.guard import GrammarGuard
guard_process.MODULE = "fake_grammar_process"
guard = GrammarGuard({str(MODEL)!r}, timeout_s={0.5 if how is None else 60.0})
guard.check(structured.regex("a"))
if {busy}: guard.submit(structured.regex("spin"))
print(guard.process.pid, flush=True)
{"" if how is None else "time.sleep(100)"}
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    if busy and how is not None:
        until(lambda: bool(children_of(pid)))
    family = [pid, *(children_of(pid) if is_alive(pid) else ())]
    if how is not None:
        owner.send_signal(how)
    owner.wait(30)
    owner.stdout.close()
    until(lambda: not any(map(is_alive, family)))


def test_the_process_outlives_the_thread_that_asked_first(
    fake: Callable[..., GrammarGuard],
) -> None:
    """The kernel ends it with the thread that started it: this must be the guard's own."""
    guard = fake()
    thread = threading.Thread(target=guard.check, args=(GOOD,))
    thread.start()
    thread.join()
    time.sleep(0.2)
    pid = pid_of(guard)
    guard.check(structured.regex("a"))
    assert pid_of(guard) == pid and is_alive(pid)
