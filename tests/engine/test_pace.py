"""What tokens take, out of the lengths of steps: made-up steps of a known pace."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from penstock.engine.pace import StepPace

BASE, ROW, PROMPT = 0.004, 2e-6, 1e-5  # seconds: of a step, of a row of it, of a prompt's token


def run(pace: StepPace, steps: list[tuple[int, int]], now: float = 0.0, ahead: int = 1) -> float:
    """Steps of (rows, prompt tokens), each launched while the `ahead` before it run."""
    ends = [now]
    for at, (rows, tokens) in enumerate(steps):
        pace.launched(ends[max(0, at - ahead)])
        ends.append(ends[-1] + BASE + ROW * rows + PROMPT * tokens)
        pace.read(rows, tokens, ends[-1])
    return ends[-1]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_known_pace_is_found(ahead: int) -> None:
    pace = StepPace()
    assert pace.stats() == dict.fromkeys(
        ("token_seconds", "prompt_token_seconds", "step_seconds"), 0.0
    )
    run(pace, [(1000, 0)] * 40 + [(1000, 500), (1000, 0)] * 40, ahead=ahead)
    found = pace.stats()
    assert found["step_seconds"] == pytest.approx(BASE + 1000 * ROW)
    assert found["token_seconds"] == pytest.approx(BASE / 1000 + ROW)
    assert found["prompt_token_seconds"] == pytest.approx(PROMPT)


def test_seconds_of_rows_are_known_near_what_was_measured_lately() -> None:
    """One row takes a second, five take three; 64 were measured long ago."""
    pace, now = StepPace(), 0.0
    assert pace.alone(5) == 0
    for rows, took, times in ((64, 9.0, 3), (5, 3.0, 2000), (1, 1.0, 5)):
        for _ in range(times):
            pace.launched(now)
            now += took
            pace.read(1, 0, now, rows)
    found = [pace.alone(rows) for rows in (1, 3, 5, 10, 11, 64)]
    assert found == pytest.approx([1.0, 2.0, 3.0, 3.0, 0.0, 0.0])
    for _ in range(3):  # something disturbed steps of two rows: four rows took less
        pace.launched(now)
        now += 7.0
        pace.read(1, 0, now, 2)
    assert [pace.alone(rows) for rows in (1, 2, 3, 5)] == pytest.approx([1.0, 3.0, 3.0, 3.0])
    for _ in range(260):  # what more rows took is too old to tell
        pace.launched(now)
        now += 1.0
        pace.read(1, 0, now, 1)
    assert pace.alone(2) == pytest.approx(7.0)
    for _ in range(2001):  # steps that all draft: what one row takes alone is unknown again
        pace.launched(now)
        now += 1.0
        pace.read(1, 0, now, 4, drafting=True)
    assert pace.alone(1) == 0
    assert pace.sizes(2, 5).tolist() == [2, 3, 4, 5] and pace.sizes(60, 70).tolist() == [64, 70]
    assert pace.sizes(500, 600).tolist() == [512]


def test_what_drafts_take_beside_queries_is_measured() -> None:
    """A row takes a second, a draft a tenth, and drafting at all half a second. Steps of two rows
    with two and with four drafts are known; before them a draft counts as a row."""
    pace, now, asked = StepPace(), 0.0, np.array([3, 4, 5, 6, 12])

    def steps(queries: int, took: float, drafting: bool) -> None:
        nonlocal now
        for _ in range(4):
            pace.launched(now)
            now += took
            pace.read(2, 0, now, queries, drafting)

    for rows in (1, 2, 12):
        steps(rows, rows, drafting=False)
    assert pace.with_drafts(2, asked).tolist() == pytest.approx(asked.tolist())
    assert pace.least_drafting(2) == 0.0
    steps(4, 2.7, drafting=True)
    steps(6, 2.9, drafting=True)
    assert [pace.alone(rows) for rows in (1, 2, 7)] == pytest.approx([1, 2, 7])
    found = pace.with_drafts(2, asked)
    assert found.tolist() == pytest.approx([2.35, 2.7, 2.8, 2.9, 3.5])
    found = [pace.least_drafting(rows) for rows in (1, 2, 4, 6)]  # at most three drafts a row
    assert found == pytest.approx([2.7, 2.7, 2.9, 0.0])
    steps(3, 9.0, drafting=True)  # disturbed: four queries took less
    assert [pace.least_drafting(2), *pace.with_drafts(2, asked[:2])] == pytest.approx([2.7] * 3)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("device", [0.0, 10.0])
def test_a_step_takes_the_hosts_seconds_for_itself(device: float, ahead: int) -> None:
    """Plain steps are planned, launched and committed in a second each, drafting ones in two, three
    and four, two of them among two plain ones. The device takes no time, or more than the host."""
    pace, now, flights = StepPace(), 0.0, deque[tuple[int, bool, float]]()
    free = 0.0  # when the device has done all that was launched
    for step in range(200):
        drafting = step % 4 < 2
        before, launch = (2.0, 3.0) if drafting else (1.0, 1.0)
        now += before
        launched, now = now, now + launch
        free = max(free, launched) + device
        pace.launched(launched, before, launch)
        flights.append((9 if drafting else 5, drafting, free))
        if len(flights) > ahead:
            queries, drafting, ended = flights.popleft()
            waited, now = ended > now, max(now, ended)
            fetched, after = now, 4.0 if drafting else 1.0
            now += after
            pace.read(5, 0, fetched, queries, drafting, after, waited)
    alone, drafts = pace.alone(5), float(pace.with_drafts(5, np.array([9]))[0])
    assert pace.stats()["step_seconds"] > 0
    if not device:
        assert (alone, drafts) == pytest.approx((3.0, 9.0))
    elif ahead:
        assert (alone, drafts) == pytest.approx((device, device), rel=0.02)
    else:
        assert (alone, drafts) == pytest.approx((3.0 - 1 + device, 9.0 - 3 + device))


def test_few_rows_make_no_token_dear() -> None:
    """What it does at its fullest is what a token takes, for thousands of steps after."""
    pace = StepPace()
    now = run(pace, [(1000, 0)] * 50)
    run(pace, [(1, 0)] * 200, now)
    assert pace.stats()["token_seconds"] < 1.2 * (BASE / 1000 + ROW)


def test_rest_is_no_part_of_a_step() -> None:
    pace = StepPace()
    now = run(pace, [(10, 0)] * 20)
    run(pace, [(10, 0)] * 20, now + 1000)
    assert pace.stats()["step_seconds"] == pytest.approx(BASE + 10 * ROW)


def test_prompts_alone_are_paced_too() -> None:
    pace = StepPace()
    run(pace, [(0, 2000)] * 10)
    assert pace.stats()["prompt_token_seconds"] == pytest.approx(PROMPT + BASE / 2000)
    assert pace.stats()["token_seconds"] == 0
