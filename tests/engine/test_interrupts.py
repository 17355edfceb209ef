"""Ctrl-C waits for the end of a held block, and only there, and only once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from penstock.engine.interrupts import held_interrupts


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_waits_for_the_end() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with held_interrupts():
            press()
            reached.append("the end of the block")
        reached.append("what comes after")
    assert reached == ["the end of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_twice_is_at_once() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        press()
        reached.append("first")
        press()
        reached.append("second")
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_block_s_own_error_comes_through() -> None:
    with pytest.raises(ZeroDivisionError), held_interrupts():
        press()
        raise ZeroDivisionError


def test_other_handlers_and_threads_are_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with held_interrupts():
            press()
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
    other = threading.Thread(target=lambda: held_interrupts().__enter__())
    other.start()
    other.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
