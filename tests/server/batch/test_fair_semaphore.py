"""What a fair semaphore lets in beside what is there, in which order, and what a cancelled wait leaves."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from penstock.server.batch.fair_semaphore import FairSemaphore

Weight = tuple[int, int]


class Lines:
    """Lines before it, and those of them that are in, in the order in which they came in."""

    def __init__(self, room: FairSemaphore) -> None:
        self.room = room
        self.tasks: list[asyncio.Task[None]] = []
        self.there: list[tuple[int, Weight]] = []

    async def come(self, *weights: Weight) -> list[int]:
        """Gives who is in, by number."""
        for weight in weights:
            self.tasks.append(asyncio.create_task(self._enter(len(self.tasks), weight)))
        return await self.settled()

    async def _enter(self, number: int, weight: Weight) -> None:
        await self.room.acquire(*weight)
        self.there.append((number, weight))

    async def go(self, number: int) -> list[int]:
        (line,) = [each for each in self.there if each[0] == number]
        self.there.remove(line)
        self.room.release(*line[1])
        return await self.settled()

    async def settled(self) -> list[int]:
        for _ in range(3):
            await asyncio.sleep(0)
        return [number for number, _ in self.there]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_bytes_are_never_passed_but_by_one_that_is_alone() -> None:
    async def main() -> None:
        lines = Lines(FairSemaphore(24, 64))
        assert await lines.come((1, 40), (1, 40), (1, 1)) == [0], "the small one waits behind the large one"
        assert await lines.go(0) == [1, 2]
        assert await lines.come((1, 65)) == [1, 2]
        await lines.go(1)
        assert await lines.go(2) == [3]
        assert await lines.come((1, 0), (1, 1)) == [3]
        await lines.end()

    run(main())


def test_a_line_that_takes_all_is_alone() -> None:
    """A careful batch's: what is there when the engine dies is to blame."""

    async def main() -> None:
        room = FairSemaphore(24, 64)
        lines = Lines(room)
        assert await lines.come((1, 1), room.capacity, (1, 1), room.capacity) == [0]
        assert await lines.go(0) == [1]
        assert await lines.go(1) == [2]
        assert await lines.go(2) == [3]
        await lines.end()

    run(main())


def test_who_gives_up_lets_the_next_in() -> None:
    async def main() -> None:
        lines = Lines(FairSemaphore(24, 64))
        assert await lines.come((1, 40), (1, 40), (1, 1)) == [0]
        lines.tasks[1].cancel()
        assert await lines.settled() == [0, 2]
        await lines.go(0)
        assert await lines.go(2) == []
        assert await lines.come((24, 64)) == [3], "all is given back"
        await lines.end()

    run(main())


def test_who_gives_up_as_its_place_comes_free_holds_none() -> None:
    """A cancelled task learns of it one turn of the loop after its wait does."""

    async def main() -> None:
        lines = Lines(FairSemaphore(24, 64))
        assert await lines.come((24, 64), (1, 1), (1, 1), (24, 64)) == [0]
        lines.tasks[1].cancel()
        lines.tasks[2].cancel()
        assert await lines.go(0) == [3]
        assert all(task.cancelled() for task in lines.tasks[1:3])
        assert await lines.come((1, 1)) == [3]
        lines.tasks[4].cancel()
        assert await lines.go(3) == []
        assert await lines.come((1, 1), (24, 64)) == [5], "all was given back once, and no more"
        lines.room.release(*lines.there.pop()[1])
        lines.tasks[6].cancel()  # let in and given up in one moment
        assert await lines.settled() == []
        assert await lines.come((24, 64)) == [7]
        await lines.end()

    run(main())


def test_drawn_lines_pass_the_bound_by_one_at_most() -> None:
    draw = random.Random(5)

    async def main() -> None:
        lines = Lines(FairSemaphore(100, 1_000))
        passed = 0
        for _ in range(2_000):
            if len(lines.there) < 2 or draw.random() < 0.5:
                await lines.come((draw.choice((1, 7, 60, 150)), draw.choice((1, 30, 400))))
            else:
                await lines.go(draw.choice(lines.there)[0])
            *before, last = [weight for _, weight in lines.there]
            assert sum(sequences for sequences, _ in before) < 100 or not before
            passed += sum(sequences for sequences, _ in before) + last[0] > 100
            assert sum(size for _, (_, size) in lines.there) <= 1_000
        assert passed > 100
        await lines.end()

    run(main())


class Guest:
    """Somebody who takes a place, and keeps it until told to leave."""

    def __init__(self, slots: FairSemaphore, owner: str) -> None:
        self.waived, self.leaves, self.inside = asyncio.Event(), asyncio.Event(), False
        self.task = asyncio.create_task(self._stay(slots, owner))

    async def _stay(self, slots: FairSemaphore, owner: str) -> None:
        async with slots.slot(owner, self.waived):
            self.inside = True
            await self.leaves.wait()
        self.inside = False


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_free_place_goes_to_the_owner_who_holds_the_fewest() -> None:
    async def play() -> None:
        slots = FairSemaphore(2)
        first = [Guest(slots, "a") for _ in range(4)]
        second = [Guest(slots, "b") for _ in range(2)]
        guests = first + second
        await settle()
        assert [guest.inside for guest in guests] == [True, True, False, False, False, False]
        for leaver, inside in ((0, [1, 4]), (1, [4, 2]), (4, [2, 5]), (5, [2, 3]), (2, [3]), (3, [])):
            guests[leaver].leaves.set()
            await settle()
            assert {at for at, guest in enumerate(guests) if guest.inside} == set(inside)

    asyncio.run(play())


@pytest.mark.parametrize("how", ["waived", "cancelled", "cancelled as it is let in"])
def test_who_stops_waiting_takes_no_place(how: str) -> None:
    async def play() -> None:
        slots = FairSemaphore(1)
        holder, goner, next_one = (Guest(slots, "a") for _ in range(3))
        await settle()
        if how == "waived":
            goner.waived.set()
            await settle()
            assert goner.inside and holder.inside and not next_one.inside
        elif how == "cancelled":
            goner.task.cancel()
            await settle()
        holder.leaves.set()
        if how == "cancelled as it is let in":
            while holder.inside:
                await asyncio.sleep(0)
            goner.task.cancel()
        await settle()
        assert next_one.inside and goner.inside == (how == "waived")
        for guest in (goner, next_one):
            guest.leaves.set()
        await settle()
        last = Guest(slots, "a")
        await settle()
        assert last.inside and not next_one.inside
        last.leaves.set()
        await last.task

    asyncio.run(play())
