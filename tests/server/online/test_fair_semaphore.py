"""What a fair semaphore lets in beside what is there, in which order, and what a cancelled wait
leaves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from penstock.server.online.fair_semaphore import FairSemaphore

Asked = tuple[int, int] | tuple[int, int, str]  # places, bytes and owner


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """In a loop of its own, which cancels at its end who still waits."""

    @wraps(test)
    def run(**values: Any) -> None:
        asyncio.run(test(**values))

    return run


class Lines:
    """Lines before it, and those of them that are in, in the order in which they came in."""

    def __init__(self, *capacity: int) -> None:
        self.room = FairSemaphore(*capacity)
        self.tasks: list[asyncio.Task[None]] = []
        self.there: dict[int, Asked] = {}

    async def come(self, *asked: Asked) -> list[int]:
        """Gives who is in, by number."""
        self.tasks += [
            asyncio.create_task(self._enter(at, each))
            for at, each in enumerate(asked, len(self.tasks))
        ]
        return await self.settled()

    async def _enter(self, number: int, asked: Asked) -> None:
        await self.room.acquire(*asked)
        self.there[number] = asked

    async def go(self, number: int) -> list[int]:
        self.room.release(*self.there.pop(number))
        return await self.settled()

    async def settled(self) -> list[int]:
        for _ in range(20):
            await asyncio.sleep(0)
        return list(self.there)


@played
async def test_bytes_are_never_passed_but_by_one_that_is_alone() -> None:
    lines = Lines(24, 64)
    assert await lines.come((1, 40), (1, 40), (1, 1)) == [0], (
        "the small one waits behind the large one"
    )
    assert await lines.go(0) == [1, 2]
    assert await lines.come((1, 65)) == [1, 2]
    await lines.go(1)
    assert await lines.go(2) == [3]
    assert await lines.come((1, 0), (1, 1)) == [3]


@played
async def test_a_line_that_takes_all_is_alone() -> None:
    """A careful batch's: what is there when the engine dies is to blame."""
    lines = Lines(24, 64)
    assert await lines.come((1, 1), (24, 64), (1, 1), (24, 64)) == [0]
    assert [await lines.go(number) for number in range(3)] == [[1], [2], [3]]


@played
async def test_who_gives_up_lets_the_next_in() -> None:
    lines = Lines(24, 64)
    assert await lines.come((1, 40), (1, 40), (1, 1)) == [0]
    lines.tasks[1].cancel()
    assert await lines.settled() == [0, 2]
    await lines.go(0)
    assert await lines.go(2) == []
    assert await lines.come((24, 64)) == [3], "all is given back"


@played
async def test_who_gives_up_as_its_place_comes_free_holds_none() -> None:
    """A cancelled task learns of it one turn of the loop after its wait does."""
    lines = Lines(24, 64)
    assert await lines.come((24, 64), (1, 1), (1, 1), (24, 64)) == [0]
    lines.tasks[1].cancel()
    lines.tasks[2].cancel()
    assert await lines.go(0) == [3]
    assert await lines.come((1, 1)) == [3]
    lines.tasks[4].cancel()
    assert await lines.go(3) == []
    assert await lines.come((1, 1), (24, 64)) == [5], "all was given back once, and no more"
    lines.room.release(*lines.there.pop(5))
    lines.tasks[6].cancel()  # let in and given up in one moment
    assert await lines.settled() == []
    assert await lines.come((24, 64)) == [7]


@played
async def test_drawn_lines_pass_the_bound_by_one_at_most() -> None:
    draw, lines, passed = random.Random(5), Lines(100, 1_000), 0
    for _ in range(1_000):
        if len(lines.there) < 2 or draw.random() < 0.5:
            await lines.come((draw.choice((1, 7, 60, 150)), draw.choice((1, 30, 400))))
        else:
            await lines.go(draw.choice(list(lines.there)))
        *before, last = [asked[0] for asked in lines.there.values()]
        assert sum(before) < 100 or not before
        passed += sum(before) + last > 100
        assert sum(asked[1] for asked in lines.there.values()) <= 1_000
    assert passed > 50


@played
async def test_a_free_place_goes_to_the_owner_who_holds_the_fewest() -> None:
    lines = Lines(2, 0)
    assert await lines.come(*[(1, 0, "a")] * 4, *[(1, 0, "b")] * 2) == [0, 1]
    for leaver, inside in (
        (0, {1, 4}),
        (1, {4, 2}),
        (4, {2, 5}),
        (5, {2, 3}),
        (2, {3}),
        (3, set()),
    ):
        assert set(await lines.go(leaver)) == inside


class Guest:
    """Somebody who takes a slot, and keeps it until told to leave."""

    def __init__(self, slots: FairSemaphore) -> None:
        self.waived, self.leaves, self.inside = asyncio.Event(), asyncio.Event(), False
        self.task = asyncio.create_task(self._stay(slots))

    async def _stay(self, slots: FairSemaphore) -> None:
        async with slots.slot("a", self.waived):
            self.inside = True
            await self.leaves.wait()
        self.inside = False


@pytest.mark.parametrize("how", ["waived", "cancelled", "cancelled as it is let in"])
@played
async def test_who_stops_waiting_for_a_slot_takes_none(how: str) -> None:
    lines = Lines(1)
    holder, goner, next_one = (Guest(lines.room) for _ in range(3))
    await lines.settled()
    if how == "waived":
        goner.waived.set()
        await lines.settled()
        assert goner.inside and holder.inside and not next_one.inside
    elif how == "cancelled":
        goner.task.cancel()
        await lines.settled()
    holder.leaves.set()
    if how == "cancelled as it is let in":
        while holder.inside:
            await asyncio.sleep(0)
        goner.task.cancel()
    await lines.settled()
    assert next_one.inside and goner.inside == (how == "waived")
    goner.leaves.set()
    next_one.leaves.set()
    await lines.settled()
    assert await lines.come((1, 0)) == [0] and not next_one.inside
