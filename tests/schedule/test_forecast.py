"""Forecast against a replay token by token, and what LengthModel learns."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from penstock.schedule.forecast import Forecast, LengthModel


@dataclass
class Replayed:
    """A row of the replay: blocks it has, tokens it will make, and its place in its last block."""

    own: int
    remaining: int
    phase: int

    def blocks_after(self, steps: int) -> int:
        """What it holds once so many steps have run;
        it takes a block whenever a token opens one."""
        if steps >= self.remaining:
            return 0
        return self.own + sum((self.phase + step) % 16 == 0 for step in range(1, steps + 1))

    def counted_after(self, steps: int) -> int:
        """The same, but it gives its blocks back only at the end of the bucket in which it ends."""
        if steps > -(-self.remaining // 16) * 16:
            return 0
        return self.own + sum((self.phase + step) % 16 == 0 for step in range(1, steps + 1))


def drawn(rng: random.Random) -> tuple[list[Replayed], int]:
    rows = [
        Replayed(
            rng.randrange(1, 9),
            rng.choice([1, 15, 16, 17, rng.randrange(1, 120)]),
            rng.randrange(16),
        )
        for _ in range(rng.randrange(12))
    ]
    return rows, rng.randrange(20)


def forecast_of(rows: list[Replayed], fixed: int) -> Forecast:
    own = np.array([row.own for row in rows], np.int32)
    return Forecast.of(own, np.array([row.remaining for row in rows], np.int64), fixed)


def check(forecast: Forecast, rows: list[Replayed], fixed: int) -> None:
    """At each bucket's start it is what the rows hold then, those that ended within the bucket
    before still counted."""
    exact = [
        fixed + sum(row.counted_after(16 * b) for row in rows) for b in range(forecast.use.size)
    ]
    assert forecast.use.tolist() == exact
    assert forecast.peak == max(exact)
    horizon = max((row.remaining for row in rows), default=0)
    assert forecast.use.size * 16 >= horizon
    truth = [fixed + sum(row.blocks_after(step) for row in rows) for step in range(horizon + 1)]
    assert all(forecast.use[b] >= truth[16 * b] for b in range(len(truth[::16])))
    assert max(truth) <= forecast.peak + len(rows), (
        "between two bucket starts a row takes one block at the most"
    )


@pytest.mark.parametrize("seed", range(60))
def test_of_and_add_are_the_replay(seed: int) -> None:
    rng = random.Random(seed)
    rows, fixed = drawn(rng)
    forecast = forecast_of(rows, fixed)
    check(forecast, rows, fixed)
    for _ in range(3):
        count, own, remaining = rng.randrange(1, 5), rng.randrange(1, 4), rng.randrange(1, 150)
        prefix = rng.randrange(5)
        forecast.add(count, own, remaining, prefix)
        rows += [Replayed(own, remaining, rng.randrange(16)) for _ in range(count)]
        fixed += prefix
        check(forecast, rows, fixed)


@pytest.mark.parametrize("seed", range(60))
def test_room_is_the_most_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    rows, fixed = drawn(rng)
    capacity, own, remaining = rng.randrange(1, 160), rng.randrange(1, 4), rng.randrange(1, 150)

    def fits(count: int) -> bool:
        """Whether at each bucket that the new rows live in, all hold no more than the capacity."""
        new = [Replayed(own, remaining, 0)] * count
        buckets = range(-(-remaining // 16) + 1)
        return all(
            fixed + sum(r.counted_after(16 * b) for r in rows + new) <= capacity for b in buckets
        )

    room = forecast_of(rows, fixed).room(capacity, own, remaining)
    assert room >= 0 and (room == 0 or fits(room)) and not fits(room + 1)


def remaining_of(model: LengthModel, ages: list[int], limit: int = 10_000) -> list[int]:
    found = model.remaining(np.array(ages, np.int32), np.full(len(ages), limit, np.int32))
    return [int(x) for x in found]


def test_before_anything_is_known_it_expects_half_of_the_limit() -> None:
    assert remaining_of(LengthModel(1000), [0, 500], 80) == [40, 40]


def test_it_learns_the_mean_and_what_is_left_of_old_rows() -> None:
    model = LengthModel(2048)
    model.observe(np.array([40] * 90 + [1000] * 10, np.int32))
    mean = 0.9 * 40 + 0.1 * 1000
    young, old = remaining_of(model, [0, 100])
    assert abs(model.mean - mean) < 16 and abs(young - mean) < 16
    assert abs(old - 900) < 32, "who got past the short ones is a long one"
    assert remaining_of(model, [2000]) == [16], "past all that was seen: one more bucket"


def test_remaining_stays_between_one_and_the_limit() -> None:
    model = LengthModel(512)
    model.observe(np.random.default_rng(1).integers(1, 512, 400).astype(np.int32))
    ages = np.arange(0, 600, 7, dtype=np.int32)
    for limit in (1, 5, 100, 1000):
        left = model.remaining(ages, np.full(ages.size, limit, np.int32))
        assert left.min() >= 1 and left.max() <= limit
    assert model.remaining(ages, np.full(ages.size, 0, np.int32)).tolist() == [1] * ages.size


@pytest.mark.parametrize("seen", [0, 400])
def test_one_row_is_expected_to_make_what_it_is_among_many(seen: int) -> None:
    model, ages = LengthModel(512), np.arange(0, 600, 7, dtype=np.int32)
    model.observe(np.random.default_rng(1).integers(1, 512, seen).astype(np.int32))
    for limit, scale in ((0, 1.0), (5, 1.0), (1000, 0.3), (1000, 1.7)):
        many = model.remaining(ages, np.full(ages.size, limit, np.int32), scale).tolist()
        assert [model.remaining_of_one(age, limit, scale) for age in ages.tolist()] == many


def test_old_work_fades() -> None:
    model = LengthModel(2048)
    model.observe(np.full(1000, 1000, np.int32))
    before = model.mean
    for _ in range(50):
        model.observe(np.full(100, 20, np.int32))
    assert before > 990 and model.mean < 50


def test_a_group_s_own_samples_stretch_it_once_there_are_enough() -> None:
    model = LengthModel(2048)
    model.observe(np.full(100, 100, np.int32))
    assert model.scale(7, 7 * 300) == 1.0
    assert 2.5 < model.scale(8, 8 * 300) < 3.1
    assert model.scale(100, 100 * 2000) == 4.0 and model.scale(100, 100) == 0.25
    assert LengthModel(100).scale(50, 50) == 1.0
