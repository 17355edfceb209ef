"""Prefix groups against the best of all groupings, by brute force over few units."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.schedule.prefix_groups import PrefixGroup, SharingCosts, Unit, find_groups

READS = SharingCosts()
COSTS = {
    "tokens read": READS,
    "members cost": SharingCosts(member=40),
    "as on a GPU": SharingCosts(member_token=1.2, tile_token=1.9, tile_members=16, member=58),
    "a launch": SharingCosts(member_token=1.2, tile_token=1.9, tile_members=4, member=30, step=300),
}


def drawn(rng: random.Random, count: int) -> list[Unit]:
    """Units whose beginnings are paths in one tree: a block's number stands for all blocks up to
    it."""
    numbers: dict[tuple[int, ...], int] = {}
    units = []
    for slot in range(count):
        words = tuple(rng.randrange(2) for _ in range(rng.randrange(0, 7)))
        # branches come after even numbers of blocks
        path = [words[: n + 1] for n in range(len(words)) for _ in (0, 1)]
        steps = [(*part, n % 2) for n, part in enumerate(path)]
        blocks = [numbers.setdefault((n, *step), len(numbers) + 1) for n, step in enumerate(steps)]
        units.append(Unit(slot, np.array(blocks, np.int32), rng.choice([1, 1, 2, 3, 8])))
    return units


def refs_of(units: list[Unit]) -> np.ndarray:
    refs = np.zeros(200, np.int32)
    for unit in units:
        refs[unit.blocks] += 1
    return refs


def common(units: list[Unit]) -> int:
    shared = 0
    while all(
        u.blocks.size > shared and u.blocks[shared] == units[0].blocks[shared] for u in units
    ):
        shared += 1
    return shared


def saved(units: list[Unit], shared: int, costs: SharingCosts) -> float:
    """By hand: what rows read by themselves, less what is spent where they are a group."""
    tails, tokens, tiles = sum(unit.tails for unit in units), shared * 16, 0
    while tiles * costs.tile_members < tails:
        tiles += 1
    alone = tails * tokens * costs.member_token
    return alone - tiles * tokens * costs.tile_token - tails * costs.member if tails > 1 else 0.0


def partitions(units: list[Unit]) -> Iterator[list[list[Unit]]]:
    if not units:
        yield []
        return
    first, rest = units[0], units[1:]
    for parts in partitions(rest):
        yield [[first], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [first, *part], *parts[i + 1 :]]


def best(units: list[Unit], costs: SharingCosts) -> float:
    most = max(
        sum(max(0.0, saved(part, common(part), costs)) for part in parts)
        for parts in partitions(units)
    )
    return max(0.0, most - costs.step)


def check(units: list[Unit], groups: list[PrefixGroup], costs: SharingCosts) -> float:
    """What groups that are sound save."""
    by_slot = {unit.slot: unit for unit in units}
    members = Counter(slot for group in groups for slot in group.slots)
    assert not members or max(members.values()) == 1, "a unit stands in two groups"
    total = 0.0
    for group in groups:
        mine = [by_slot[slot] for slot in group.slots]
        assert (
            group.blocks.size == common(mine)
            and (group.blocks == mine[0].blocks[: group.blocks.size]).all()
        )
        gain = saved(mine, group.blocks.size, costs)
        assert gain > 0, "a group that doesn't pay"
        assert group.saved == pytest.approx(gain)
        total += gain
    gains = [group.saved for group in groups]
    assert gains == sorted(gains, reverse=True), (
        "where there is no room for all, the first are taken"
    )
    assert not groups or total > costs.step, "the launch costs more than all of them save"
    return total - costs.step if groups else 0.0


@pytest.mark.parametrize("name", COSTS)
def test_nearly_the_most_is_saved_and_almost_always_all_of_it(name: str) -> None:
    """Branches are settled one at a time: in one drawing of about fifty, at worst, something is
    left unsaved."""
    costs = COSTS[name]
    drawings = []
    for seed in range(400):
        rng = random.Random(seed)
        units = drawn(rng, rng.randrange(1, 8))
        drawings.append(
            (check(units, find_groups(units, refs_of(units), costs), costs), best(units, costs))
        )
    assert all(got <= most + 1e-6 for got, most in drawings), "the brute force is not the best"
    assert sum(got >= most - 1e-6 for got, most in drawings) >= 390
    assert all(got * 2 >= most for got, most in drawings)
    assert sum(got for got, _ in drawings) > 0.995 * sum(most for _, most in drawings)


def found(units: list[Unit], costs: SharingCosts) -> dict[tuple[int, ...], list[int]]:
    groups = find_groups(units, refs_of(units), costs)
    return {tuple(sorted(group.slots)): group.blocks.tolist() for group in groups}


def test_the_example_of_the_page() -> None:
    a = Unit(0, np.array([1, 2, 3, 4], np.int32), 64)
    b, c = (Unit(n, np.array([1, 2, 7 + n], np.int32), 1) for n in (1, 2))
    assert found([a, b, c], READS) == {(0,): [1, 2, 3, 4], (1, 2): [1, 2]}
    assert found([a, b, c], SharingCosts(member=20)) == {(0,): [1, 2, 3, 4]}, (
        "two tails save 32 and cost 40"
    )


def test_the_cost_of_tiles_decides_between_many_over_less_and_few_over_more() -> None:
    """Two groups of 3 over 4 blocks, or one of 6 over 3: a tile for each, or one for both."""
    units = [Unit(n, np.array([1, 2, 3, 4 + n], np.int32), 3) for n in range(2)]
    assert found(units, SharingCosts(tile_token=1.0)) == {(0,): [1, 2, 3, 4], (1,): [1, 2, 3, 5]}
    assert found(units, SharingCosts(tile_token=1.5)) == {(0, 1): [1, 2, 3]}
    assert found(units, SharingCosts(tile_token=1.5, tile_members=3)) == {
        (0,): [1, 2, 3, 4],
        (1,): [1, 2, 3, 5],
    }
    assert found(units, SharingCosts(tile_token=6.5)) == {}


def test_a_launch_is_worth_it_for_many_and_not_for_one() -> None:
    """Each of these saves 32 * 7 = 224 tokens."""
    costs = SharingCosts(step=1000)
    units = [Unit(n, np.array([2 * n + 1, 2 * n + 2], np.int32), 8) for n in range(5)]
    assert found(units[:4], costs) == {}
    assert len(found(units, costs)) == 5


def test_one_tail_is_no_group_whatever_it_would_save() -> None:
    free = SharingCosts(tile_token=0.0)
    assert found([Unit(0, np.array([1, 2], np.int32), 1)], free) == {}
    assert found([Unit(0, np.array([1, 2], np.int32), 2)], free) == {(0,): [1, 2]}
