"""The order of a step's rows between two findings of the prefix groups."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.request import Request, SamplingParams
from penstock.schedule import batch_order as batch_order_file
from penstock.schedule.batch_order import BatchOrder
from penstock.schedule.blocks import BlockPool
from penstock.schedule.prefix_groups import SharingCosts
from penstock.schedule.request_state import ForkGroup, Groups, RequestState
from penstock.schedule.rows import FREE, RUNNING, Rows


class Scene:
    """Fork groups of running tails, two blocks of prefix each, without a scheduler."""

    def __init__(self, few: int = 64) -> None:
        self.rows, self.groups, self.pool = Rows(32, 8), Groups(), BlockPool(64)
        self.batch_order = BatchOrder(self.rows, self.groups, self.pool, SharingCosts(), few)
        self.step = 0

    def add(self, tails: int, blocks: tuple[int, ...] = ()) -> tuple[ForkGroup, np.ndarray]:
        """A group over these blocks, or over two of its own."""
        tokens = np.arange(16 * (len(blocks) or 2) + 1, dtype=np.int32)
        request = Request(request_id=1, prompt=tokens.tobytes(), sampling=SamplingParams(n=tails))
        samples = np.arange(tails, dtype=np.int32)
        group = self.groups.add(
            RequestState.of(request, 0, 0, 100, -1), tokens, samples, tokens.size
        )
        group.blocks = np.array(blocks, np.int32) if blocks else self.pool.take(2)
        if blocks:
            self.pool.refs[group.blocks] += 1
        return group, self.join(group, tails)

    def join(self, group: ForkGroup, tails: int) -> np.ndarray:
        rows = self.rows.take(tails)
        group.running += tails
        self.rows.state[rows], self.rows.group[rows] = RUNNING, group.slot
        self.batch_order.joined(group)
        return rows

    def remove(self, group: ForkGroup, rows: np.ndarray) -> None:
        self.rows.free(rows)
        group.running -= rows.size
        self.batch_order.removed(np.array([group.slot]), np.array([rows.size]))
        if not group.running:
            self.groups.drop(group)

    def grouped(self) -> list[tuple[list[int], list[int]]]:
        """(rows, blocks) of each prefix group of the next step; every running row must stand in it
        once."""
        order = self.batch_order.order(self.batch_order.running(), self.step)
        self.step += 1
        assert sorted(order.rows.tolist()) == np.flatnonzero(self.rows.state == RUNNING).tolist()
        bounds = zip(order.start[:-1], order.start[1:], order.blocks, order.length, strict=True)
        return [
            (sorted(order.rows[a:b].tolist()), blocks[: n // 16].tolist())
            for a, b, blocks, n in bounds
        ]


def test_a_slot_used_again_does_not_inherit_its_group() -> None:
    scene = Scene(few=0)
    first, rows = scene.add(5)
    for _ in range(9):
        found = scene.grouped()
    assert found == [(sorted(rows.tolist()), first.blocks.tolist())]
    scene.remove(first, rows)
    second, others = scene.add(4)
    assert second.slot == first.slot
    assert scene.grouped() == [], (
        "rows were put behind the prefix of those that had their slot before"
    )
    for _ in range(9):
        found = scene.grouped()
    assert found == [(sorted(others.tolist()), second.blocks.tolist())]


def test_tails_that_leave_and_join_keep_the_group() -> None:
    scene = Scene(few=0)
    group, rows = scene.add(6)
    other, _ = scene.add(1)
    for _ in range(9):
        scene.grouped()
    scene.remove(group, rows[:2])
    assert scene.grouped() == [(sorted(rows[2:].tolist()), group.blocks.tolist())]
    assert other.running == 1 and np.count_nonzero(scene.rows.state != FREE) == 5


def test_a_group_that_grows_is_grouped_anew_until_it_shares_all_its_blocks() -> None:
    scene = Scene()
    first, one = scene.add(1, (40, 41, 42, 43, 44, 45))
    _, other = scene.add(1, (40, 41, 42, 43, 44, 46))
    assert scene.grouped() == [(sorted([*one, *other]), [40, 41, 42, 43, 44])], (
        "both over what they share"
    )
    eight = scene.join(first, 8)
    assert scene.grouped() == [(sorted([*one, *eight]), first.blocks.tolist())], (
        "the large one over all of its own"
    )
    more = scene.join(first, 3)
    assert scene.grouped() == [(sorted([*one, *eight, *more]), first.blocks.tolist())]
    second, alone = scene.add(1)
    assert len(scene.grouped()) == 1
    rest = scene.join(second, 5)
    assert (sorted([*alone, *rest]), second.blocks.tolist()) in scene.grouped()


def test_more_tails_of_a_group_that_shares_all_its_blocks_cost_no_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    group, _ = scene.add(6)
    scene.grouped()
    found = []
    monkeypatch.setattr(batch_order_file, "find_groups", lambda *told: found.append(told) or [])
    scene.join(group, 4)
    assert len(scene.grouped()[0][0]) == 10 and not found
    scene.add(3)
    scene.grouped()
    assert len(found) == 1


def test_a_group_that_half_has_left_is_looked_at_again() -> None:
    """Over two blocks a tail saves 32 tokens: 8 pay for a launch of 70, 4 still, 3 don't."""
    scene = Scene()
    scene.batch_order.sharing = SharingCosts(step=70)
    group, rows = scene.add(8)
    assert scene.grouped() == [(sorted(rows.tolist()), group.blocks.tolist())]
    scene.remove(group, rows[:4])
    assert scene.grouped() == [(sorted(rows[4:].tolist()), group.blocks.tolist())]
    scene.remove(group, rows[4:5])
    assert scene.grouped() == []
    more = scene.join(group, 2)
    assert scene.grouped() == [(sorted([*rows[5:], *more]), group.blocks.tolist())]
