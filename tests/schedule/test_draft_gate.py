"""The gate of drafts, over steps whose seconds are given: it drafts where that gives more tokens
per second, and lets rows pause whose drafts are wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.schedule.draft_gate import (
    FIRST_PAUSE,
    HOLD,
    LONGEST_PAUSE,
    LONGEST_REST,
    MOST_ROWS,
    DraftGate,
)
from penstock.schedule.drafting import Drafting
from penstock.schedule.mask_slots import MaskSlots
from penstock.schedule.rows import Rows
from penstock.schedule.step import Int32

MOST = 4
COUNT = MOST_ROWS + 44


class Costs:
    """Seconds of a step by a function of its queries; every size is one of its own. more: seconds
    that a step with drafts takes beyond it. fewest: drafts of the smallest step that was measured
    with some."""

    def __init__(
        self, of: Callable[[np.ndarray], np.ndarray], more: float = 0.0, fewest: int = 1
    ) -> None:
        self.of, self.more, self.fewest = of, more, fewest

    def alone(self, rows: int) -> float:
        return float(self.of(np.array([float(rows)]))[0])

    def with_drafts(self, rows: int, queries: np.ndarray) -> np.ndarray:
        return self.of(queries.astype(float)) + self.more

    def least_drafting(self, rows: int) -> float:
        return float(self.with_drafts(rows, np.array([rows + self.fewest]))[0])

    def sizes(self, least: int, most: int) -> np.ndarray:
        return np.arange(least, most + 1)


def flat(queries: np.ndarray) -> np.ndarray:
    return np.ones(queries.size)


def gate(
    of: Callable[[np.ndarray], np.ndarray], more: float = 0.0, fewest: int = 1
) -> tuple[DraftGate, Rows]:
    columns = Rows(COUNT, 4)
    columns.order[:] = np.arange(COUNT)
    return DraftGate(columns, MOST, Costs(of, more, fewest)), columns


def offered(made: DraftGate, rows: Int32, most: int = MOST) -> list[int]:
    if not made.wants(rows):
        return [0] * rows.size
    counts = made.offer(rows, np.zeros(rows.size, np.int32), np.full(rows.size, most, np.int32))
    assert counts.tokens is None
    return counts.counts.tolist()


def drive(made: DraftGate, rows: Int32, right: Callable[[Int32], Int32], steps: int) -> list[int]:
    """Steps that are read at once: the drafts of each."""
    told = []
    for _ in range(steps):
        counts = np.array(offered(made, rows), np.int32)
        told.append(int(counts.sum()))
        if counts.any():
            made.settled(rows, counts, right(counts))
    return told


SIZES = [0, *range(1, 17), 24, 32, 48, 64, 96, 128, 192, 256, 320]
# an 8B on an H200: milliseconds of a step by queries
MEASURED = [2.5, 2.5, *[3.0] * 14, 3.2, 3.3, 3.4, 3.5, 4.2, 4.6, 4.8, 6.4, 6.8, 8.1]


def paid(chances: np.ndarray, tokens: int, fixed: int | None = None) -> tuple[float, np.ndarray]:
    """Rows that each draw so many tokens, and whose drafts are right with a chance each -> the
    milliseconds of all steps, and the step in which each row ended. fixed: as many drafts a row in
    place of the gate's."""
    made, _ = gate(lambda queries: np.interp(queries, SIZES, MEASURED))
    left, ends = np.full(chances.size, tokens), np.zeros(chances.size, int)
    random, spent, step = np.random.default_rng(1), 0.0, 0
    while (left > 0).any():
        rows = np.flatnonzero(left > 0).astype(np.int32)
        most = np.minimum(left[rows] - 1, MOST).astype(np.int32)
        counts = np.zeros_like(rows)
        if made.wants(rows):
            counts = made.offer(rows, np.zeros_like(rows), most).counts
        counts = counts if fixed is None else np.minimum(fixed, most)
        right = np.zeros_like(rows)
        for place in range(MOST):
            right += (
                (counts > place) & (right == place) & (random.random(rows.size) < chances[rows])
            )
        if counts.any():
            made.settled(rows, counts, right)
        spent += float(np.interp(rows.size + counts.sum(), SIZES, MEASURED))
        left[rows] -= 1 + right
        step += 1
        ends[rows[left[rows] <= 0]] = step
    return spent, ends


@pytest.mark.parametrize("chance", [0.6, 0.8])
def test_rows_of_one_kind_are_not_told_apart_by_their_luck(chance: float) -> None:
    chances = np.full(64, chance)
    best = min(paid(chances, 256, fixed)[0] for fixed in range(1, MOST + 1))
    assert paid(chances, 256)[0] < 1.1 * best < 0.9 * paid(chances, 256, 0)[0]


def test_few_good_rows_are_found_among_many_bad_ones() -> None:
    chances = np.where(np.arange(64) % 16 == 0, 0.9, 0.0)
    spent, ends = paid(chances, 256)
    assert (ends[chances > 0] < 100).all()
    assert spent < 1.02 * paid(np.zeros(64), 256, 0)[0]


def test_what_cannot_be_guessed_costs_little() -> None:
    for rows in (1, 16, 64, 200):
        assert paid(np.zeros(rows), 256)[0] < 1.015 * paid(np.zeros(rows), 256, 0)[0]


def test_drafts_come_one_step_after_the_device_was_asked() -> None:
    made, _ = gate(flat)
    rows = np.arange(3, dtype=np.int32)
    assert offered(made, rows) == [0, 0, 0] and made.proposes
    assert offered(made, rows) == [MOST] * 3 and made.proposes
    assert offered(made, np.array([0, 7], np.int32)) == [MOST, 0]  # row 7 is new
    assert offered(made, rows, most=2) == [2, 2, 2]


def test_no_drafts_where_a_query_costs_as_much_as_a_row() -> None:
    made, _ = gate(lambda queries: queries)
    assert drive(made, np.arange(20, dtype=np.int32), lambda counts: counts, 40) == [0] * 40
    assert not made.proposes


@pytest.mark.parametrize("more, drafts", [(0.5, True), (3.0, False)])
def test_what_drafts_take_beside_queries_counts(more: float, drafts: bool) -> None:
    """Flat steps of one second, all drafts right: five tokens a step, for 1.5 seconds or for 4; half
    of the drafts at first."""
    made, _ = gate(flat, more)
    told = drive(made, np.arange(3, dtype=np.int32), lambda counts: counts, 40)
    assert (sum(told) > 400) == drafts and bool(made.proposes) == drafts


def test_where_drafting_is_dear_new_rows_are_like_those_before() -> None:
    """A step with drafts takes half as long again. Rows whose drafts are wrong make way for others."""
    made, columns = gate(flat, 0.5)
    rows, tries = np.arange(8, dtype=np.int32), list[int]()
    for _ in range(12):
        tries.append(sum(drive(made, rows, lambda counts: 0 * counts, 20)))
        columns.order += COUNT
    assert tries[0] > 0 and sum(tries[2:]) < tries[0]
    # at last they try again
    assert sum(drive(made, rows, lambda counts: counts, 2000)) > 2000


def test_where_very_dear_drafts_never_pay_all_rest_for_long() -> None:
    """A step with drafts takes 1.7 times as long, and the rows of 40 jobs, a tail of 64 to 4 rows
    each, are right in a third. Drafts that are always right end the rests."""
    made, columns = gate(flat, 0.7)
    random, drafting, idle = np.random.default_rng(1), list[bool](), list[bool]()

    def third(counts: Int32) -> Int32:
        return np.minimum(counts, random.geometric(2 / 3, counts.size) - 1).astype(np.int32)

    for _ in range(40):
        for rows in (64, 32, 16, 8, 4):
            told = drive(made, np.arange(rows, dtype=np.int32), third, 8)
            drafting += [at > 0 for at in told]
            idle.append(made.idle)
        columns.order += COUNT
    assert 0 < sum(drafting) < 0.03 * len(drafting), sum(drafting)
    assert not idle[0] and sum(idle[-100:]) > 80
    told = drive(made, np.arange(4, dtype=np.int32), lambda counts: counts, 3 * LONGEST_PAUSE)
    assert sum(told[-LONGEST_PAUSE:]) > 3 * LONGEST_PAUSE and not made.idle
    columns.order += COUNT
    assert sum(drive(made, np.arange(4, dtype=np.int32), lambda counts: counts, 8)) > 40


@pytest.mark.parametrize("fewest", [1, 40])
def test_what_few_drafts_take_is_judged_by_steps_that_were_measured(fewest: int) -> None:
    """By steps without drafts and those with 40, which take twice as long, a single draft seems to
    cost little. All rest for long only where no step with fewer drafts was measured."""
    made, _ = gate(lambda queries: 1 + queries / 20, 0.0, fewest)
    told = drive(made, np.arange(20, dtype=np.int32), lambda counts: 0 * counts, 400)
    # the mean rest of the last 200 steps is 16 steps, or more than all of them
    assert sum(told[-200:]) == 0 and (made._next_rest > LONGEST_REST) == (fewest == 40)


def test_a_gate_that_drafts_nothing_looks_seldom() -> None:
    made, _ = gate(lambda queries: queries)
    rows = np.arange(20, dtype=np.int32)
    looks = 0
    for _ in range(160):
        if made.wants(rows):
            looks += 1
            made.offer(rows, 0 * rows, 0 * rows + MOST)
    assert looks < 160 / LONGEST_REST + 6
    while made.wants(rows):
        made.offer(rows, 0 * rows, 0 * rows + MOST)
    assert made.wants(rows[: rows.size // 2])


def test_rows_with_a_constraint_take_no_place_from_others() -> None:
    made, columns = gate(lambda queries: np.where(queries <= 20, 1.0, queries))
    rows = np.arange(16, dtype=np.int32)
    columns.constrained[:8] = True
    offered(made, rows)
    counts = offered(made, rows)
    assert sum(counts[:8]) == 0 and sum(counts[8:]) == 4
    columns.constrained[:] = True
    columns.order += COUNT  # other samples
    assert offered(made, rows) == [0] * 16 and not made.proposes


def test_unknown_seconds_mean_no_drafts() -> None:
    made, _ = gate(lambda queries: np.zeros(queries.size))
    assert drive(made, np.arange(2, dtype=np.int32), lambda counts: counts, 3) == [0] * 3


def test_the_better_rows_draft_where_there_is_room_for_some() -> None:
    """Steps are flat up to 8 queries and steep beyond. Four rows, two of them always right."""
    made, _ = gate(lambda queries: np.where(queries <= 8, 1.0, queries))
    rows = np.arange(4, dtype=np.int32)
    for _ in range(12):
        counts = np.array(offered(made, rows), np.int32)
        assert counts.sum() <= 4
        made.settled(rows, counts, np.where(rows < 2, counts, 0).astype(np.int32))
    counts = np.sum([offered(made, rows) for _ in range(2 * HOLD)], 0)
    assert counts[:2].sum() > 10 * counts[2:].sum()


def test_fewer_drafts_where_a_longer_guess_seldom_holds() -> None:
    """Each query costs a tenth of a step. Rows with one right draft each time try no more."""
    made, _ = gate(lambda queries: 1 + queries / 10)
    rows = np.arange(1, dtype=np.int32)
    drive(made, rows, lambda counts: np.minimum(counts, 1).astype(np.int32), 60)
    assert 1 <= offered(made, rows)[0] < MOST


def test_rows_whose_drafts_are_wrong_pause_longer_each_time() -> None:
    made, _ = gate(flat)
    told = np.array(drive(made, np.zeros(1, np.int32), lambda counts: 0 * counts, 9000))
    tries = np.flatnonzero(told)
    pauses = np.diff(tries)[np.diff(tries) > FIRST_PAUSE // 2]
    assert (np.diff(pauses) >= 0).all() and pauses[0] >= FIRST_PAUSE
    assert abs(pauses[-1] - LONGEST_PAUSE) <= HOLD
    assert told[-3000:].sum() < 0.02 * 3000


def test_a_row_that_is_right_again_drafts_again() -> None:
    made, _ = gate(flat)
    row = np.zeros(1, np.int32)
    drive(made, row, lambda counts: 0 * counts, 200)
    told = drive(made, row, lambda counts: counts, 2 * LONGEST_PAUSE)
    assert told[-1] == MOST and sum(told) > LONGEST_PAUSE


def test_steps_launched_before_a_pause_do_not_lengthen_it() -> None:
    """Steps are read two steps late."""
    made, _ = gate(flat)
    row, late = np.zeros(1, np.int32), list[np.ndarray]()
    tries = list[int]()
    for step in range(80):
        counts = np.array(offered(made, row), np.int32)
        if counts.any():
            tries.append(step)
        late.append(counts)
        if len(late) > 2 and (read := late[-3]).any():
            made.settled(row, read, 0 * read)
    pauses = np.diff(tries)[np.diff(tries) > FIRST_PAUSE // 2]
    assert FIRST_PAUSE <= pauses[0] < FIRST_PAUSE + 4


def test_a_lone_row_that_was_wrong_tries_again() -> None:
    """At a cost at which a share below a fifth does not pay."""
    made, _ = gate(lambda queries: np.interp(queries, SIZES, MEASURED))
    row = np.zeros(1, np.int32)
    drive(made, row, lambda counts: 0 * counts, 10)
    told = drive(made, row, lambda counts: counts, 200)
    assert told[-1] == MOST


def test_another_sample_in_a_row_begins_anew() -> None:
    made, columns = gate(flat)
    row = np.zeros(1, np.int32)
    drive(made, row, lambda counts: 0 * counts, 300)
    columns.order[0] = 1000
    told = [offered(made, row)[0] for _ in range(LONGEST_REST + 2)]
    first = told.index(MOST)
    assert told == [0] * first + [MOST] * (len(told) - first)


def test_a_step_of_many_rows_has_no_drafts_and_leaves_none() -> None:
    made, _ = gate(flat)
    drafting = Drafting(made._columns, MaskSlots(1, made._columns, 50), queries=600)
    drafting.drafter = made
    rows = np.arange(MOST_ROWS + 1, dtype=np.int32)
    made._columns.blocks[:], made._columns.limit[:] = 4, 60
    few, lengths = rows[:3], np.zeros(rows.size, np.int32)
    assert drafting.offer(few, lengths[:3]) is None and drafting.proposes
    drafts = drafting.offer(few, lengths[:3])
    assert drafts is not None and drafts.counts.tolist() == [MOST] * 3
    assert drafting.offer(rows, lengths) is None and not drafting.proposes
    assert drafting.offer(few, lengths[:3]) is None and drafting.proposes
