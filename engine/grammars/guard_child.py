"""Compiles grammars, to see what happens.

    python -m engine.grammars.guard_child FOLDER SECONDS OWNER

Started by `GuardProcess` (engine/constraints), whose process has the id OWNER. It loads the
tokenizer once, and forks for every grammar: that takes milliseconds, and whatever a grammar does to
the process that compiles it, the next one finds all as it was. It ends when its owner closes the
pipe, or dies.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec
import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.constraints import mask_words
from engine.constraints.grammar import Grammar
from engine.constraints.grammar_compiler import STACK_BYTES, GrammarCompiler
from engine.constraints.guard_process import HEAD_BYTES, GuardReply, frame
from engine.errors import MantaError, RequestError
from engine.grammars.model_compiler import make_grammar_compiler
from engine.process.parent_death import signal_at_parent_death

MAX_MEMORY = 2**29
"""Bytes that a grammar may take, beside the stack of the thread that compiles it (up to 40 MB were
measured for grammars that compile in time)."""
MAX_WALL = 6
"""Times the CPU time that a grammar may take. A check that others keep from the CPU for longer ends
without a verdict: on a machine with four servers, 3 were not enough for a grammar of 40 ms."""
NUM_TRIAL_TOKENS = 64
TRIAL_S = 0.1
"""CPU time after which no other trial token is chosen."""


def main(folder: str, timeout_s: float, owner: int) -> None:
    """Answer until standard input ends."""
    _die_with(owner)
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # nothing else may get between the frames
    try:
        compiler = make_grammar_compiler(ModelConfig.from_pretrained(Path(folder)))
        _ = compiler.tokenizer  # its thread must start behind the fork
    except MantaError as error:
        answers.write(frame(GuardReply("refused", str(error))))
        return
    answers.write(frame(GuardReply("ok")))
    while (payload := _read(sys.stdin.fileno())) is not None:
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _die_with(parent)
            _answer(compiler, payload, answers, timeout_s)
        _, status = os.waitpid(child, 0)
        if status:
            answers.write(frame(_cause(status)))


def _answer(
    compiler: GrammarCompiler, payload: dict[str, Any], answers: BinaryIO, timeout_s: float
) -> NoReturn:
    """Compile, reply and exit."""
    status = 1
    try:
        _limit_resources()
        # Their signals kill. CPU time first: on a busy machine a good grammar takes longer, too.
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        signal.setitimer(signal.ITIMER_REAL, MAX_WALL * timeout_s)
        reply = _compile(compiler, payload)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        answers.write(frame(reply))
        status = 0
    finally:
        os._exit(status)  # without the clean-up of the process that it was forked from


def _compile(compiler: GrammarCompiler, payload: dict[str, Any]) -> GuardReply:
    try:
        # As the scheduler does it: what follows has the stack of an ordinary thread.
        constraint = Grammar.create(payload, compiler.vocab_size, (), compiler)
        problem = _walk(constraint, compiler.vocab_size)
    except RequestError as error:
        problem = error.message
    except MemoryError:
        return GuardReply("died", "out of memory")
    return GuardReply("refused", problem) if problem else GuardReply("ok")


def _walk(constraint: Grammar, vocab_size: int) -> str:
    """Follow the grammar for some tokens, always the same. Returns what goes wrong, or "".

    Some grammars compile and fail at the first tokens, since only these show their size.
    """
    rng = random.Random(0)
    end = time.thread_time() + TRIAL_S
    mask = np.zeros(mask_words(vocab_size), np.uint32)
    for _ in range(NUM_TRIAL_TOKENS):
        constraint.fill_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if constraint.error or not len(allowed):
            break
        constraint.accept(int(rng.choice(allowed)))
        if constraint.is_terminated or time.thread_time() > end:
            break
    return constraint.error


def _cause(status: int) -> GuardReply:
    if not os.WIFSIGNALED(status):
        return GuardReply("died", f"exit status {os.waitstatus_to_exitcode(status)}")
    number = signal.Signals(os.WTERMSIG(status))
    if number is signal.SIGPROF:
        return GuardReply("late")
    if number is signal.SIGALRM:
        return GuardReply("starved")
    words = {signal.SIGSEGV: "stack overflow", signal.SIGABRT: "out of memory, or a mistake in it"}
    return GuardReply("died", words.get(number, number.name))


def _limit_resources() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + STACK_BYTES + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # native code prints its last words


def _read(fd: int) -> dict[str, Any] | None:
    """The payload of the next grammar; None at the end of the pipe."""
    head = _read_bytes(fd, HEAD_BYTES)
    body = head and _read_bytes(fd, int.from_bytes(head, "big"))
    return msgspec.msgpack.decode(body, type=dict[str, Any]) if body else None


def _read_bytes(fd: int, count: int) -> bytes:
    """`count` bytes, or none if the pipe ends before."""
    data = b""
    while len(data) < count:
        piece = os.read(fd, count - len(data))
        if not piece:
            return b""
        data += piece
    return data


def _die_with(parent: int) -> None:
    """End with `parent`, which may be gone already."""
    signal_at_parent_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
