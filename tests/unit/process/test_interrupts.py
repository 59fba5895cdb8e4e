"""`HeldInterrupts`: when Ctrl-C is handled, by whom, and what is left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from engine.process.interrupts import HeldInterrupts


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def handler() -> Iterator[object]:
    found = signal.getsignal(signal.SIGINT)
    yield found
    assert signal.getsignal(signal.SIGINT) is found


def test_the_first_waits_until_it_is_let_in() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupts() as interrupts:
        interrupts.let_in()
        press()
        done.append("work")
        interrupts.let_in()
        done.append("more")
    assert done == ["work"]


def test_one_that_is_not_let_in_comes_at_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        press()
        done.append("work")
    assert done == ["work"]


def test_an_error_outranks_it() -> None:
    with pytest.raises(ValueError), HeldInterrupts():
        press()
        raise ValueError


@pytest.mark.parametrize("is_let_in", [False, True])
def test_the_second_does_not_wait(is_let_in: bool) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupts() as interrupts:
        press()
        try:
            if is_let_in:
                interrupts.let_in()
        finally:
            press()
            done.append("not reached")
    assert done == []


def test_another_handler_is_called_once() -> None:
    calls = []

    def note(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    old = signal.signal(signal.SIGINT, note)
    try:
        with HeldInterrupts() as interrupts:
            press()
            assert calls == []
            interrupts.let_in()
            interrupts.let_in()
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is note
    finally:
        signal.signal(signal.SIGINT, old)


def test_what_is_ignored_stays_ignored() -> None:
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with HeldInterrupts() as interrupts:
            press()
            interrupts.let_in()
    finally:
        signal.signal(signal.SIGINT, old)


def test_other_threads_change_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run() -> None:
        with HeldInterrupts() as interrupts:
            seen.append(signal.getsignal(signal.SIGINT))
            interrupts.let_in()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
