"""The live line of a job by a clock of its own: a rate that steps of minutes don't take away, and
an end that is told once it is known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.jobs import progress
from penstock.jobs.progress import FEW, Count, Progress


class Job:
    """A job whose clock and tokens a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int) -> None:
        self.now, self.tokens = 0.0, 0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.count = Count("samples", total)
        self.progress = Progress([self.count], lambda: self.tokens)

    def line(self, seconds: float, tokens: int, done: int) -> str:
        self.now, self.tokens, self.count.done = seconds, tokens, done
        return self.progress.line()


def test_a_step_of_minutes_leaves_the_rate_and_promises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, 1024)
    for second in range(60):  # the model begins
        line = job.line(second, 0, 0)
        assert (
            "0 tok/s" not in line and "left" not in line and "first tokens are on their way" in line
        )
    job.line(60, 6_000, 1)
    for second in range(61, 240):  # one long step: none of it is told before its end
        line = job.line(second, 6_000, 1)
        assert " 0 tok/s" not in line and "left" not in line, line
    assert "expected end not known yet" in line


def test_the_end_is_by_the_pace_since_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 1_000)
    job.line(600, 100, 1)
    for second in range(1, FEW):
        assert "not known yet" in job.line(600 + second, 100 * second, 1 + second)
    line = job.line(600 + FEW, 100 * FEW, 1 + FEW)
    # one a second; by all that went before it would be 15 h
    assert line.endswith("about 16 min 29 s left"), line
    assert " 100 tok/s" in line


def test_a_job_of_few_is_told_of_too(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 3)
    assert "not known yet" in job.line(5, 10, 1)
    assert "not known yet" in job.line(6, 20, 2)
    assert "3/3 samples" in job.line(7, 30, 3)


def test_what_is_under_way_is_told_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 2_000)
    job.count.begun = 1_024
    assert job.line(5, 10, 0).startswith("0/2,000 samples, 1,024 under way · ")
    job.count.ended = 1_024
    assert job.line(6, 20, 1_024).startswith("1,024/2,000 samples · ")
