"""The line of what is under way: written over on a terminal, seldom elsewhere, and generate's own
on it."""

from __future__ import annotations

import io
import sys

import pytest

from penstock import status_line
from penstock.status_line import Bar, StatusLine, duration, percent, size_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminals_line_is_written_over_and_what_is_kept_stays() -> None:
    out = Terminal()
    line = StatusLine(out)
    line.show("1 of 9")
    line.show("x" * 300)
    line.keep("done")
    line.clear()
    assert out.getvalue() == f"\r\x1b[K1 of 9\r\x1b[K{'x' * 200}\r\x1b[Kdone\n\r\x1b[K"


def test_elsewhere_a_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(status_line.time, "monotonic", lambda: now[0])
    line = StatusLine(out)
    for seconds, anew in ((0, False), (1, False), (2, True), (11, False), (12, False)):
        now[0] = seconds
        line.show(str(seconds), anew=anew)
    line.clear()
    assert out.getvalue() == "0\n2\n12\n"


def test_generates_line_counts_samples_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, says in (
        (Terminal(), "penstock: 2/3 samples, 0 s, about 0 s left\n"),
        (io.StringIO(), ""),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        bar = Bar(3)
        bar.advance()
        bar.advance()
        bar.close()
        assert stream.getvalue().removeprefix("\r\x1b[K") == says


def test_sizes_have_one_digit_behind_the_point() -> None:
    sizes = [size_of(n) for n in (0, 100, 3 << 10, (1 << 20) - 1, 29 << 19, 15 << 30, 5 << 40)]
    assert sizes == [
        "0.0 KiB",
        "0.1 KiB",
        "3.0 KiB",
        "1024.0 KiB",
        "14.5 MiB",
        "15.0 GiB",
        "5120.0 GiB",
    ]


def test_durations_have_two_units_at_most() -> None:
    assert [duration(s) for s in (40, 200, 7500, 273_600)] == [
        "40 s",
        "3 min 20 s",
        "2 h 5 min",
        "3 d 4 h",
    ]


def test_a_notebooks_cell_is_live() -> None:
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    line = StatusLine(stream)
    assert line.live and not stream.isatty()
    line.show("x" * 300)
    line.show("2 of 9")
    line.keep("done")
    wiped = "\r" + " " * 100 + "\r"
    assert stream.getvalue() == f"\r{'x' * 100}{wiped}2 of 9\r      \rdone\n"


def test_a_share_has_one_spelling() -> None:
    assert [percent(0.5883), percent(1, 0), percent(0.00012, 3)] == ["58.8 %", "100 %", "0.012 %"]
